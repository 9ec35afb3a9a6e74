// Data that stands packed in the page: base64 of gzip, each piece unpacked once, when it is first asked for.

const unpacked = new Map();

function unpackText(id) {
  if (!unpacked.has(id)) unpacked.set(id, inflate(document.getElementById(id).textContent));
  return unpacked.get(id);
}

async function unpackJson(id) {
  return JSON.parse(await unpackText(id));
}

function inflate(packed) {
  const letters = atob(packed);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place++) bytes[place] = letters.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function make(kind, className, text) {
  // Text of runs goes into the page through here, and never as HTML.
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
