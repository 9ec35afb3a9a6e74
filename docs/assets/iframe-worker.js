/* Workers for pages that are opened from disk: their script runs in a hidden frame instead. */
if (location.protocol === "file:") {
  const absolute = (address, base) => new URL(address, base).href;

  window.Worker = class FrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.address = absolute(address, document.baseURI);
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.src = "about:blank";
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.prepare();
      this.load(this.address).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.deliver(data));
      });
    }

    /* What the script expects of a worker's world. Scripts that it imports are loaded one after the other. */
    prepare() {
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inside.importScripts = (...addresses) =>
        addresses.reduce(
          (before, address) => before.then(() => this.load(absolute(address, this.address))),
          Promise.resolve(),
        );
    }

    load(address) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        script.onload = done;
        script.onerror = () => failed(new Error(`${address} could not be loaded`));
        script.src = address;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }

    deliver(data) {
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
