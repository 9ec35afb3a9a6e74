// A browser of groups: filters on the left of the index, a list of groups, and one group side by side.
// Every text of a run goes through `make` or `writeMarked`, which know no HTML.

const STAGES = ["before", "after the warm-up", "after"];
const SPLITS = ["training", "evaluation", "held-out"];
const SHOWN_AT_ONCE = 150;
const ASKED = 140;  // Characters of a prompt in the list.
const IMAGES_ASKED = 4;  // Images of a prompt in the list.
const BY_STEP = { "first step first": null, "last step first": (a, b) => b.step - a.step };
const BY_ROW = { "by row": null, "most improved": (a, b) => b.gain - a.gain, "least improved": (a, b) => a.gain - b.gain };
const ORDERS = {
  ...BY_STEP,
  ...BY_ROW,
  "highest mean score": (a, b) => b.mean - a.mean,
  "lowest mean score": (a, b) => a.mean - b.mean,
  "widest spread": (a, b) => b.spread - a.spread,
  "longest": (a, b) => b.longest - a.longest,
};
const BY_SCORE = ["most improved", "least improved", "highest mean score", "lowest mean score", "widest spread"];
const CHANGES = { "any change": null, "better after training": 1, "worse after training": -1, "the same": 0 };

function sayNumber(value) {
  if (!Number.isFinite(value)) return "–";
  return String(Number(value.toFixed(Math.abs(value) >= 100 ? 1 : 4))).replace("-", "−");
}

function countNoun(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function writeMarked(element, text, pattern) {
  if (!pattern) {
    element.append(text);
    return;
  }
  let from = 0;
  for (const match of text.matchAll(new RegExp(pattern.source, "gi"))) {
    element.append(text.slice(from, match.index), make("mark", "", match[0]));
    from = match.index + match[0].length;
  }
  element.append(text.slice(from));
}

function meanOf(values) {
  // Completions that no reward scored do not count.
  const known = values.filter((each) => each !== null);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}

function compareStages(totals, stages) {
  // Mean scores of each measurement, of groups that have them.
  const means = STAGES.map((_, stage) => meanOf(totals.filter((_, place) => stages[place] === stage)));
  return { means, gain: (means[2] ?? 0) - (means[0] ?? 0) };
}

function endOf(turns) {
  // The end of what the user asked last, in one line: a question stands after instructions and solved examples.
  const [, whole, parts] = turns.findLast(([role]) => role === "user") ?? turns.at(-1) ?? ["", ""];
  // Images stand beside it.
  const said = parts ? parts.filter((part) => typeof part === "string").join(" ") : whole;
  const text = said.replace(/\s+/g, " ").trim();
  return text.length > ASKED ? `…${text.slice(-ASKED)}` : text;
}

function imagesOf(turns) {
  return turns.flatMap(([, , parts]) => (parts ?? []).filter((part) => typeof part !== "string"));
}

function readPack(index, prompts, images, id) {
  // From columns to groups; texts stay in their blocks.
  let at = 0;
  const groups = index.groups.map(([split, step, row, prompt, count, block, inBlock, change], place) => {
    const from = at;
    at += count;
    const totals = index.totals.slice(from, at), known = totals.filter((each) => each !== null);
    return {
      place, split, step, row, prompt, count, block, inBlock, change, from, totals,
      mean: meanOf(totals),
      spread: known.length ? Math.max(...known) - Math.min(...known) : 0,
      ...compareStages(totals, index.stages.slice(from, at)),
      longest: Math.max(...index.tokens.slice(from, at)),
      asked: endOf(prompts[prompt]),
    };
  });
  const known = index.totals.filter((each) => each !== null);
  const least = known.reduce((low, each) => Math.min(low, each), Infinity);
  const most = known.reduce((high, each) => Math.max(high, each), -Infinity);
  return { ...index, id, prompts, images, groups, least, most, blocks: new Map() };
}

class Browser {
  constructor(root) {
    this.root = root;
    this.kind = root.dataset.browser;
    this.sources = [...document.querySelectorAll(`.pack-${this.kind}`)];
    this.run = 0;
    this.search = 0;
    this.chosen = null;
    this.shown = [];
  }

  open() {
    this.opened ??= this.build().then(() => this.choosePack(0));
    return this.opened;
  }

  async build() {
    this.form = make("form", "filters");
    this.form.setAttribute("aria-label", "Filter groups");
    this.count = make("p", "count");
    this.count.setAttribute("aria-live", "polite");
    this.list = make("div", "list");
    this.list.setAttribute("role", "group");
    this.list.setAttribute("aria-label", "Groups");
    this.detail = make("div", "detail");
    const panes = make("div", "panes");
    panes.append(this.list, this.detail);
    this.root.replaceChildren(this.form, this.count, panes);
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => this.filterSoon());
    this.list.addEventListener("keydown", (event) => this.walk(event));
  }

  async choosePack(place) {
    this.run = place;
    const source = this.sources[place], id = source.id.replace(/-index$/, "");
    const images = document.getElementById(`${id}-images`) ? unpackJson(`${id}-images`) : [];
    this.pack = readPack(...await Promise.all([unpackJson(source.id), unpackJson(`${id}-prompts`), images]), id);
    this.buildFilters(source);
    this.chosen = this.pack.groups[0];
    await this.filter();
  }

  buildFilters(source) {
    const fields = (this.fields = {});
    const add = (name, label, element) => {
      const box = make("label", "", label);
      element.name = name;
      box.append(element);
      fields[name] = element;
      return box;
    };
    const choice = (options) => {
      const element = make("select");
      options.forEach((each) => element.append(new Option(each, each)));
      return element;
    };
    const number = (hint) => Object.assign(make("input"), {
      type: "number", step: "any", inputMode: "decimal", placeholder: hint,
    });
    const steps = this.pack.groups.map((each) => each.step);
    const parts = [];
    if (this.sources.length > 1) {
      const run = choice(this.sources.map((each) => each.dataset.run));
      run.selectedIndex = this.run;
      run.addEventListener("input", (event) => {
        event.stopPropagation();
        this.choosePack(run.selectedIndex);
      });
      parts.push(add("run", "run", run));
    }
    const splits = [...new Set(this.pack.groups.map((each) => SPLITS[each.split]))];
    if (splits.length > 1) parts.push(add("split", "sampled in", choice(["both", ...splits])));
    if (source.dataset.changes === "1") parts.push(add("change", "change", choice(Object.keys(CHANGES))));
    if (new Set(steps).size > 1) {
      parts.push(
        add("stepFrom", "step from", number(String(steps.reduce((a, b) => Math.min(a, b))))),
        add("stepTo", "to", number(String(steps.reduce((a, b) => Math.max(a, b))))),
      );
    }
    if (this.pack.rewards.length) {
      parts.push(
        add("score", "score", choice(["weighted total", ...this.pack.rewards])),
        add("scoreFrom", "from", number(sayNumber(this.pack.least))),
        add("scoreTo", "to", number(sayNumber(this.pack.most))),
      );
    }
    parts.push(
      add("order", "order", choice(this.orders())),
      add("text", "text", Object.assign(make("input"), { type: "search", placeholder: "in prompts and completions" })),
    );
    const clipped = add("clipped", "only cut off", Object.assign(make("input"), { type: "checkbox" }));
    clipped.className = "check";
    this.form.replaceChildren(...parts, clipped);
  }

  orders() {
    const other = this.kind === "held-out" ? BY_STEP : BY_ROW;
    const scored = this.pack.rewards.length > 0;
    return Object.keys(ORDERS).filter((name) => !(name in other) && (scored || !BY_SCORE.includes(name)));
  }

  sayMean(group) {
    const say = (each) => each?.toFixed(2) ?? "–";
    const measured = group.means.filter((each, stage) => each !== null || stage !== 1);
    // Nothing scores what a model trained on scored data answers.
    if (!this.pack.rewards.length) return "";
    return (this.kind === "held-out" ? measured.map(say).join(" → ") : say(group.mean)).replaceAll("-", "−");
  }

  filterSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.filter(), 150);
  }

  readFilters() {
    const value = (name) => this.fields[name]?.value ?? "";
    const bound = (name, otherwise) => (value(name) === "" ? otherwise : Number(value(name)));
    const text = value("text").trim();
    const which = this.pack.rewards.indexOf(value("score"));
    return {
      split: value("split") && value("split") !== "both" ? SPLITS.indexOf(value("split")) : null,
      change: CHANGES[value("change")] ?? null,
      steps: [bound("stepFrom", -Infinity), bound("stepTo", Infinity)],
      scores: which < 0 ? this.pack.totals : this.pack.scores[which],
      range: [bound("scoreFrom", -Infinity), bound("scoreTo", Infinity)],
      hasRange: value("scoreFrom") !== "" || value("scoreTo") !== "",
      clipped: this.fields.clipped.checked,
      pattern: text ? new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i") : null,
      order: ORDERS[value("order")],
    };
  }

  async filter() {
    const search = ++this.search, wanted = (this.wanted = this.readFilters());
    const found = [];
    for (const group of this.pack.groups) {
      if (!this.fits(group, wanted)) continue;
      if (wanted.pattern) {
        const texts = await this.textsOf(group);
        // Another filter has been asked for meanwhile.
        if (search !== this.search) return;
        if (!this.hasText(group, texts, wanted)) continue;
      }
      found.push(group);
    }
    if (wanted.order) found.sort(wanted.order);
    this.shown = found;
    this.tellCount();
    this.drawList(SHOWN_AT_ONCE);
    // A group that no longer fits would be all in grey.
    if (this.chosen && found.length && !found.includes(this.chosen)) await this.choose(found[0], false);
    else if (this.chosen) await this.drawGroup(this.chosen);
  }

  fits(group, wanted) {
    if (wanted.split !== null && group.split !== wanted.split) return false;
    if (wanted.change !== null && group.change !== wanted.change) return false;
    if (group.step < wanted.steps[0] || group.step > wanted.steps[1]) return false;
    if (!wanted.hasRange && !wanted.clipped) return true;
    return Array.from({ length: group.count }, (_, place) => place).some((place) => this.matches(group, place, wanted));
  }

  matches(group, place, wanted) {
    const score = wanted.scores[group.from + place];
    if (wanted.hasRange && (score === null || score < wanted.range[0] || score > wanted.range[1])) return false;
    return !wanted.clipped || this.pack.clipped[group.from + place] === 1;
  }

  hasText(group, texts, wanted) {
    const asked = this.pack.prompts[group.prompt].some(([, text]) => wanted.pattern.test(text));
    const written = (place) => (texts.m ? texts.m[place].map(([, text]) => text) : [texts.t[place]]);
    return texts.t.some((_, place) => (
      (asked || written(place).some((text) => wanted.pattern.test(text))) && this.matches(group, place, wanted)
    ));
  }

  textsOf(group) {
    // Once a block is there, its groups are had without waiting.
    const known = this.pack.blocks.get(group.block);
    if (known) return known[group.inBlock];
    const pack = this.pack;
    return unpackJson(`${pack.id}-block-${group.block}`).then((block) => {
      pack.blocks.set(group.block, block);
      return block[group.inBlock];
    });
  }

  tellCount() {
    const all = this.pack.groups.length, completions = this.shown.reduce((sum, each) => sum + each.count, 0);
    const some = this.shown.length === all ? "" : `${this.shown.length.toLocaleString("en")} of `;
    const groups = countNoun(all, this.kind === "held-out" ? "prompt" : "group");
    this.count.textContent = `${some}${groups}, ${countNoun(completions, "completion")}`;
  }

  drawList(most) {
    const part = this.shown.slice(0, most).map((group) => this.drawItem(group));
    if (this.shown.length > most) {
      const more = make("button", "more", `show more (${(this.shown.length - most).toLocaleString("en")})`);
      more.type = "button";
      more.addEventListener("click", () => this.drawList(most + 5 * SHOWN_AT_ONCE));
      part.push(more);
    }
    if (!part.length) part.push(make("p", "dim", "Nothing fits these filters."));
    this.list.replaceChildren(...part);
  }

  drawItem(group) {
    const item = make("button", "item");
    item.type = "button";
    item.dataset.place = group.place;
    item.setAttribute("aria-pressed", String(group === this.chosen));
    const where = this.kind === "held-out" ? `row ${group.row}` : `step ${group.step}`;
    const head = make("span", "where", group.split === 1 ? `${where}, evaluation` : where);
    const strip = make("span", "strip");
    strip.setAttribute("aria-label", `scores ${group.totals.map(sayNumber).join(", ")}`);
    for (const total of this.pack.rewards.length ? group.totals.slice(0, 32) : []) {
      const bar = make("span");
      // From 0, so that equal scores are equal bars whatever else was sampled.
      const low = Math.min(this.pack.least, 0), width = Math.max(this.pack.most, 0) - low;
      bar.style.setProperty("--height", width && total !== null ? (total - low) / width : 0);
      strip.append(bar);
    }
    const line = make("span", "line");
    line.append(head, strip, make("span", "mean", this.sayMean(group)));
    const asked = make("span", "asked");
    const images = imagesOf(this.pack.prompts[group.prompt]);
    asked.append(...images.slice(-IMAGES_ASKED).map((image) => this.drawImage(image)), group.asked);
    item.append(line, asked);
    item.addEventListener("click", () => this.choose(group, true));
    return item;
  }

  async choose(group, byHand) {
    this.chosen = group;
    this.list.querySelectorAll(".item").forEach((item) => {
      item.setAttribute("aria-pressed", String(Number(item.dataset.place) === group.place));
    });
    if (byHand) history.replaceState(null, "", this.linkTo(group));
    await this.drawGroup(group);
    if (byHand && this.root.clientWidth < 760) this.detail.scrollIntoView({ block: "start" });
  }

  linkTo(group) {
    const run = this.sources.length > 1 ? `&run=${this.run}` : "";
    if (this.kind === "held-out") return `#held-out-row=${group.row}${run}`;
    return `#step=${group.step}&row=${group.row}${group.split === 1 ? "&split=evaluation" : ""}${run}`;
  }

  async drawGroup(group) {
    const texts = await this.textsOf(group);
    if (group !== this.chosen) return;
    const cards = make("div", "cards"), prompt = this.drawPrompt(group);
    texts.t.forEach((_, place) => cards.append(this.drawCard(group, texts, place)));
    this.detail.replaceChildren(this.drawHead(group), prompt, cards);
    // The question stands at the end, after instructions and solved examples.
    prompt.scrollTop = prompt.scrollHeight;
  }

  drawHead(group) {
    const head = make("div", "head");
    const where = this.kind === "held-out" ? `row ${group.row}` : `step ${group.step}, row ${group.row}, ${SPLITS[group.split]}`;
    head.append(make("h4", "", where), make("span", "dim", this.kind === "held-out" ? this.sayMean(group) : `mean ${this.sayMean(group)}`));
    return head;
  }

  drawPrompt(group) {
    const box = make("div", "prompt");
    box.append(...this.pack.prompts[group.prompt].map((turn) => this.drawTurn(turn)));
    return box;
  }

  drawImage([place, name]) {
    const image = make("img");
    // Whatever a run's file holds, it is taken for a JPEG.
    image.src = `data:image/jpeg;base64,${this.pack.images[place]}`;
    image.alt = image.title = name;
    return image;
  }

  drawTurn([role, text, parts]) {
    const turn = make("div", "turn"), body = make("div", text ? "text" : "text dim");
    if (role) turn.append(make("span", "role", role));
    for (const part of parts ?? [text || "(empty)"]) {
      if (typeof part === "string") writeMarked(body, part, text ? this.wanted.pattern : null);
      else body.append(this.drawImage(part));
    }
    turn.append(body);
    return turn;
  }

  drawEpisode(turns) {
    // What the model did not write is shaded: only its own tokens are learned from.
    const box = make("div", "episode");
    for (const [role, text, isOwn] of turns) {
      const turn = this.drawTurn([isOwn ? role : `${role}, not learned from`, text]);
      if (!isOwn) turn.classList.add("foreign");
      box.append(turn);
    }
    return box;
  }

  drawCard(group, texts, place) {
    const at = group.from + place, text = texts.t[place], card = make("article", "card");
    const active = this.wanted.hasRange || this.wanted.clipped;
    if (active && !this.matches(group, place, this.wanted)) card.classList.add("other");
    const head = make("header");
    const stage = this.pack.stages.length ? STAGES[this.pack.stages[at]] : `#${place + 1}`;
    head.append(make("strong", "", stage));
    if (this.pack.rewards.length) head.append(make("span", "total", sayNumber(group.totals[place])));
    head.append(make("span", "dim", countNoun(this.pack.tokens[at], "token")));
    if (texts.e) head.append(make("span", "dim", texts.e[place]));
    else if (this.pack.clipped[at]) head.append(make("span", "badge", "cut off"));
    const body = texts.m ? this.drawEpisode(texts.m[place]) : this.drawTurn(["", text]).lastChild;
    card.append(head, this.drawScores(group, texts, place), body);
    return card;
  }

  drawScores(group, texts, place) {
    const scores = make("dl", "scores");
    // So that the total adds up.
    const weighted = this.pack.weights.some((weight) => weight !== 1);
    this.pack.rewards.forEach((name, which) => {
      const value = this.pack.scores[which][group.from + place], reason = texts.r[name]?.[place];
      const weight = weighted ? ` × ${sayNumber(this.pack.weights[which])}` : "";
      const said = make("dd", "", value === null ? "does not apply" : `${sayNumber(value)}${weight}`);
      if (reason) said.append(make("span", "reason", ` ${reason}`));
      scores.append(make("dt", "", name), said);
    });
    return scores;
  }

  walk(event) {
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const items = [...this.list.querySelectorAll("button")];
    const next = items[items.indexOf(document.activeElement) + way];
    next?.focus();
    if (next?.classList.contains("item")) next.click();
  }

  async follow(told) {
    // A link to one group: #step=12&row=5, or #held-out-row=5.
    await this.open();
    const run = Number(told.get("run") ?? 0);
    if (run !== this.run && this.sources[run]) await this.choosePack(run);
    const isHeldOut = this.kind === "held-out", row = Number(told.get(isHeldOut ? "held-out-row" : "row"));
    const split = told.get("split") === "evaluation" ? 1 : 0;
    const group = this.pack.groups.find((each) => each.row === row && (
      isHeldOut || (each.step === Number(told.get("step")) && each.split === split)
    ));
    if (!group) return;
    await this.choose(group, false);
    this.root.scrollIntoView({ block: "start" });
  }
}

function startBrowser(root) {
  const browser = new Browser(root);
  const watcher = new IntersectionObserver((seen) => {
    if (!seen.some((each) => each.isIntersecting)) return;
    watcher.disconnect();
    browser.open();
  }, { rootMargin: "600px" });
  watcher.observe(root);
  const follow = () => {
    const told = new URLSearchParams(location.hash.slice(1));
    if (told.has(browser.kind === "held-out" ? "held-out-row" : "row")) browser.follow(told);
  };
  addEventListener("hashchange", follow);
  follow();
}
