// The list of groups. Only what is visible is in the document, so that its length costs nothing.
import { find, make, plain } from "./dom.js";
import { FLAGS, OUTCOMES, outcome } from "./records.js";

const HEIGHT = 62; // pixels of an entry, as in style.css
const MARGIN = 6; // entries beyond the visible ones
const MOST_CHIPS = 10;

let found = [];
let chosen = -1;
let choose = () => {};

export function setUpList(onChoose) {
  choose = onChoose;
  find("list").addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(find("list"));
  find("list").addEventListener("click", (event) => {
    const entry = event.target.closest(".entry");
    if (!entry) return;
    const chip = event.target.closest(".chip");
    choose(found[Number(entry.dataset.place)], chip ? Number(chip.dataset.index) : null);
  });
}

// Entries hold a `group` of trajectories, or a `question` of the evaluations.
export function showList(entries, isChosen) {
  found = entries;
  chosen = found.findIndex(isChosen);
  find("spacer").style.height = `${found.length * HEIGHT}px`;
  draw();
}

// The entry `by` places further (Infinity: the last one); the first one where none is chosen.
export function neighbour(by) {
  if (!found.length) return null;
  const place = Math.min(Math.max(chosen + by, 0), found.length - 1);
  return found[place];
}

export function scrollToChosen() {
  const list = find("list");
  if (chosen < 0) return;
  const top = chosen * HEIGHT;
  if (top < list.scrollTop || top + HEIGHT > list.scrollTop + list.clientHeight) {
    list.scrollTop = Math.max(0, top - (list.clientHeight - HEIGHT) / 2);
  }
  draw();
}

function draw() {
  const list = find("list");
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - MARGIN);
  const last = Math.min(found.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + MARGIN);
  const entries = [];
  for (let place = first; place < last; place++) entries.push(entry(place));
  find("spacer").replaceChildren(...entries);
  list.setAttribute("aria-activedescendant", chosen >= first && chosen < last ? `entry${chosen}` : "");
}

function entry(place) {
  const isChosen = place === chosen;
  const { text, where, chips } = found[place].group ? groupParts(found[place]) : questionParts(found[place]);
  const element = make(
    "div",
    { class: isChosen ? "entry chosen" : "entry", role: "option", id: `entry${place}`, "aria-selected": isChosen, "data-place": place },
    make("div", { class: "question", title: text }, text),
    make("div", { class: "facts" }, make("span", { class: "where" }, where), make("span", { class: "chips" }, chips)),
  );
  element.style.top = `${place * HEIGHT}px`;
  return element;
}

function groupParts({ group, matching, sorted }) {
  const chips = group.rows.slice(0, MOST_CHIPS).map((row) => chip(row, matching.has(row.index)));
  if (group.rows.length > MOST_CHIPS) chips.push(`+${group.rows.length - MOST_CHIPS}`);
  return { text: group.question, where: [`step ${group.step}`, sorted, group.source].filter(Boolean).join(" · "), chips };
}

function questionParts({ question, names }) {
  const chips = question.results.map((result, place) => answerChip(result, names[place]));
  return {
    text: question.question,
    where: `${question.source} · temperature ${question.temperature}`,
    chips: chips.flatMap((chip, place) => (place ? ["→", chip] : [chip])),
  };
}

// The mark of an answer in an evaluation; a question mark where it lacks the question.
export function answerChip(result, name) {
  const { sign, word } = OUTCOMES[result?.outcome] ?? { sign: "?", word: "not asked" };
  const label = `${name}: ${word}${result?.f1 == null ? "" : `, F1 ${plain(result.f1)}`}`;
  return make("span", { class: `chip matching ${result?.outcome ?? ""}`, title: label, "aria-label": label }, sign);
}

function chip(row, isMatching) {
  const { sign, word, name } = outcome(row.flags, row.score);
  const softened = (row.flags & FLAGS.softened) !== 0;
  const label = `trajectory ${row.index}: ${word}, score ${plain(row.score)}${softened ? ", softened turn" : ""}`;
  const kind = `chip ${name}${isMatching ? " matching" : ""}${softened ? " softened" : ""}`;
  return make("span", { class: kind, title: label, "aria-label": label, "data-index": row.index }, sign);
}
