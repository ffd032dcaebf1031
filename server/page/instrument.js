// What the heat map counts: tokens of a kind, the difference from another answer; and its files.

import {alike, chanceDistance, isSameShape, total} from "./compare.js";
import {mapToCsv, mapToSvg} from "./figures.js";
import {pictureOf} from "./heatmap.js";
import {KINDS, keeper} from "./kinds.js";
import {readRecording, writeRecording} from "./recording.js";
import {download} from "./transfer.js";

const FILE = "file"; // the choice that opens a file
const $ = id => document.getElementById(id);

export class Instrument {
  files = []; // answers of files that were opened for a comparison

  /** panel: the ExpertsPanel. page: openRecording(name, recording), promptOf(answer), toast(text). */
  constructor(panel, page) {
    Object.assign(this, {panel, page, other: null});
    $("kind").append(...KINDS.map(([value, text]) => new Option(text, value)));
    $("kind").onchange = () => this.changed();
    $("whole").onchange = () => this.changed();
    $("pattern").oninput = () => this.changed();
    $("compare").onchange = () => this.choose($("compare").value);
    $("open_routing").onclick = () => this.pick(false);
    $("pick_routing").onchange = () => this.open($("pick_routing").files[0]);
    $("save_svg").onclick = () => this.save("svg", this.svg(), "image/svg+xml");
    $("save_csv").onclick = () => this.save("csv", mapToCsv(...this.drawn()), "text/csv");
    $("save_map").onclick = async () => this.save("png", await this.png());
    $("save_routing").onclick = () => this.saveRouting();
  }

  changed() {
    $("pattern_field").hidden = $("kind").value !== "text";
    this.panel.draw();
  }

  /** Return a function: whether a token is counted; null: all are. */
  keep = routing => routing && keeper(routing, $("kind").value, $("pattern").value);

  /** Return [Counts, Counts or null]: those to draw, and those of the other answer. */
  shown(position) {
    const parts = this.parts();
    const mine = this.count(parts, parts.length > 1 ? null : position);
    return this.other ? alike(mine, this.count(this.other.parts)) : [mine, null];
  }

  /** Return the answers that are counted: the one that is shown, or all of the chat. */
  parts() {
    const {answer} = this.panel;
    if (!$("whole").checked) return [answer];
    const kept = this.panel.others().filter(({counts}) => isSameShape(counts, answer.counts));
    return kept.length ? kept : [answer];
  }

  /** Return the sum of the answers' Counts. One without its tokens cannot be filtered. */
  count(parts, position = null) {
    const known = parts.filter(({routing}) => routing || $("kind").value === "all");
    const empty = parts[0].counts.blank();
    return known.length ? total(known.map(part => this.counts(part, position))) : empty;
  }

  counts({routing, counts}, position = null) {
    const keep = this.keep(routing);
    return routing && (keep || position !== null)
      ? routing.counts(position ?? routing.length, keep)
      : counts;
  }

  /** Return which tokens are counted, as text. */
  scope(counts) {
    const text = `${counts.tokens.toLocaleString("en")} tokens`;
    const kind = KINDS.find(([value]) => value === $("kind").value);
    const which = kind[0] === "text" ? `with "${$("pattern").value}"` : kind[1];
    const answers = this.parts().length;
    const filtered =
      (kind[0] === "all" ? text : `${text}: ${which}`) +
      (answers > 1 ? `, of ${answers} answers` : "");
    return this.other ? `${filtered}, compared with ${this.other.name}` : filtered;
  }

  /** Return how far the two answers would differ by chance, as text, or null. */
  chance() {
    const sides = [this.parts(), this.other?.parts ?? []];
    const isKnown = sides.every(parts => parts.length && parts.every(({routing}) => routing));
    if (!isKnown) return null;
    const lengths = sides.map(parts => parts.map(({routing}) => routing.length).join("+"));
    const key = [...lengths, $("kind").value, $("pattern").value];
    const isNew = this.chanceOf?.other !== this.other || this.chanceOf.key !== key.join();
    if (isNew) {
      const kept = ({routing}) => ({routing, keep: this.keep(routing)});
      const value = chanceDistance(sides.map(parts => parts.map(kept)));
      this.chanceOf = {other: this.other, key: key.join(), value};
    }
    return ` Random halves of their tokens have ${this.chanceOf.value.toFixed(2)}.`;
  }

  // The other answer ---------------------------------------------------------------------------

  /** List the answers that can be compared, and keep the choice if it is among them. */
  list() {
    const {answer, message} = this.panel;
    const canFilter = Boolean(answer?.routing);
    if (!canFilter && $("kind").value !== "all") $("kind").value = "all";
    $("kind").disabled = !canFilter;
    const own = this.panel.others().map(other => ({...other, parts: [other]}));
    this.choices = [...own, ...this.files].filter(
      other =>
        other.message !== message && answer && isSameShape(other.parts[0].counts, answer.counts),
    );
    const isKept = other => other.message === this.other?.message;
    this.other = (this.other && this.choices.find(isKept)) ?? null;
    const options = this.choices.map((other, n) => new Option(other.name, n));
    $("compare").replaceChildren(
      new Option("nothing", ""),
      ...options,
      new Option("a file ...", FILE),
    );
    $("compare").value = this.other ? this.choices.indexOf(this.other) : "";
    $("pattern_field").hidden = $("kind").value !== "text";
  }

  choose(value) {
    if (value === FILE) {
      this.list(); // the choice stays if no file is picked
      return this.pick(true);
    }
    this.other = this.choices[value] ?? null;
    this.panel.draw();
  }

  // Files --------------------------------------------------------------------------------------

  /** Let the user choose a file. toCompare: with the answer that is shown. */
  pick(toCompare) {
    this.toCompare = toCompare;
    $("pick_routing").click();
  }

  async open(file) {
    $("pick_routing").value = "";
    if (!file) return;
    try {
      const recording = readRecording(await file.text());
      if (this.toCompare) this.compareWith(file.name, recording);
      else this.page.openRecording(file.name, recording);
    } catch (error) {
      this.page.toast(error.message);
    }
  }

  compareWith(name, {answers}) {
    const parts = answers.map(({routing}) => ({routing, counts: routing.counts()}));
    const mine = this.panel.answer.counts;
    if (!parts.every(({counts}) => isSameShape(counts, mine)))
      throw new Error("The file is of a model of another shape: it cannot be compared.");
    this.other = {message: {}, name, parts}; // a mark of its own
    this.files.push(this.other);
    this.list();
    this.panel.draw();
  }

  drawn = () => [this.panel.map.counts, this.panel.map.other];

  svg() {
    const [counts] = this.drawn();
    const {model, format} = this.panel.message;
    const name = [model, format].filter(Boolean).join(", ") || "Experts";
    const paper = getComputedStyle($("experts")).backgroundColor;
    return mapToSvg(this.panel.map, [name, this.scope(counts)], paper);
  }

  png = () => pictureOf($("heat"), getComputedStyle($("experts")).backgroundColor);

  save(ending, content, type) {
    download(`experts.${ending}`, content, type);
  }

  saveRouting() {
    const {message, answer} = this.panel;
    if (!answer.routing) return this.page.toast("The tokens of this answer are not kept.");
    const {model = "", format = ""} = message;
    const about = {model, format, prompt: this.page.promptOf(message)};
    download("routing.json", writeRecording(answer.routing, about), "application/json");
  }
}
