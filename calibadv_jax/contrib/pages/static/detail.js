// A group: its trajectories side by side, tokens shaded, and why each turn got its advantage.
import { find, make, plain, signed } from "./dom.js";
import { NO_ACTIONS, outcome } from "./records.js";
import { term } from "./terms.js";
import { tokenFacts } from "./tip.js";

const STEPS = [0.25, 0.5, 1, 1.5]; // bounds of the five shades of |advantage|
const SURPRISE = [0.1, 0.5, 1, 2]; // and of -log probability, in nats
const MISMATCH = [0.01, 0.05, 0.1, 0.5]; // and of |log ratio| of learner and sampler

const FLAWS = { invalid: "Invalid", unfinished: "Unfinished" }; // by kind; other turns were executed all the same

let shading = "advantage";

const level = (value, bounds) => 1 + bounds.filter((bound) => value > bound).length;

export function legend() {
  const box = make("span", { class: "scale" });
  const sample = (kind, text) => box.append(make("span", { class: `token ${kind}` }, text), " ");
  for (const [place, text] of [[5, "< −1.5"], [3, "−1"], [1, "−0.2"]]) sample(`minus shade${place}`, text);
  sample("zero", "0");
  for (const [place, text] of [[1, "+0.2"], [3, "+1"], [5, "> +1.5"]]) sample(`plus shade${place}`, text);
  sample("zero spared", "made 0");
  return make("span", {}, "wavy line: negative, straight line: positive, dotted line: the calibration made it 0 ", box);
}

// What the shades of the group mean, as they are chosen.
function scale() {
  if (shading === "advantage") return legend();
  const bounds = shading === "surprise" ? SURPRISE : MISMATCH;
  const what = shading === "surprise" ? "−log probability, in nats: " : "|log ratio| of learner and sampler: ";
  const box = make("span", { class: "scale" });
  const texts = [`≤ ${bounds[0]}`, ...bounds.map((bound) => `> ${bound}`)];
  texts.forEach((text, place) => box.append(make("span", { class: `token zero other shade${place + 1}` }, text), " "));
  return make("span", {}, what, box);
}

// What there is to look at, where no group is chosen.
export function showNothing(advantage, counts, onShow, run) {
  const name = advantage.name ?? "unknown";
  const rows = counts.map(([value, label, number]) => {
    const button = make("button", { type: "button", disabled: number === 0 }, `${label}: ${number}`);
    button.addEventListener("click", () => onShow(value));
    return make("li", {}, button);
  });
  find("detail").replaceChildren(make("div", { id: "message" },
    make("p", {}, "Choose a group from the list, or press j. ? explains the words and the keys."),
    run.newest < run.planned && make("p", {}, `The run is at step ${run.newest} of ${run.planned}: still running, or stopped early. `
      + "Without other filters the page shows its newest step; Clear shows all."),
    make("ul", {}, rows),
    make("p", {}, `Advantages by ${name}; `, legend()),
    name === "grpo" && make("p", {}, "GRPO judges no single turn: there are no softened turns and no silver documents."),
  ));
  find("detail").dataset.ready = "nothing";
}

export function showGroup(data, entry, onChoose) {
  if (shading === "mismatch" && !hasLearner(data)) shading = "advantage";
  const flags = new Map((entry?.rows ?? []).map((row) => [row.index, row.flags]));
  const cards = data.trajectories.map((one) => trajectory(one, flags.get(one.index) ?? 0, data.is_judged));
  const columns = make("div", { class: "columns" }, cards);
  columns.addEventListener("click", (event) => {
    const head = event.target.closest(".card > header");
    if (head) onChoose(Number(head.parentElement.dataset.index));
  });
  find("detail").replaceChildren(heading(data), columns);
  find("detail").dataset.ready = `${data.step}/${data.group}`;
  find("detail").scrollTop = 0;
}

export function focusTrajectory(index) {
  for (const card of find("detail").querySelectorAll(".card")) {
    const isChosen = Number(card.dataset.index) === index;
    card.classList.toggle("chosen", isChosen);
    if (isChosen) scrollSideways(card);
  }
}

// The columns move, the heading of the group stays in view.
function scrollSideways(card) {
  const columns = card.parentElement;
  const scroller = getComputedStyle(columns).overflowX === "visible" ? find("detail") : columns; // on a phone
  const here = card.getBoundingClientRect();
  const seen = scroller.getBoundingClientRect();
  if (here.left < seen.left || here.right > seen.right) scroller.scrollLeft += here.left - seen.left - 14;
}

function heading(data) {
  const silver = Object.entries(data.silver);
  return make(
    "header",
    { class: "group" },
    make("div", { class: "bar" },
      make("button", { type: "button", class: "back" }, "← list"),
      make("span", { class: "where" }, `step ${data.step} · group ${data.group} · ${data.data_source} · ${data.question_id}`),
      make("button", { type: "button", class: "previous", title: "previous group (k)", "aria-label": "previous group" }, "↑"),
      make("button", { type: "button", class: "next", title: "next group (j)", "aria-label": "next group" }, "↓"),
      shadeChoice(data),
      make("a", { class: "save", href: `page/step_${data.step}_group_${data.group}.html`, download: `step_${data.step}_group_${data.group}.html`,
        title: "one HTML file of this group, to send to somebody" }, "save page"),
      make("button", { type: "button", class: "words", title: "words and keys (?)", "aria-label": "words and keys" }, "?"),
    ),
    make("h2", {}, data.question),
    make("p", { class: "golden" }, "accepted: ", make("b", {}, data.golden_answers.join(" | "))),
    silver.length > 0 && make("p", { class: "muted" }, term("silver document", "silver documents"), silverWords(silver, data)),
    make("details", { class: "why" }, make("summary", {}, data.brief), make("ul", {}, data.why.map((text) => make("li", {}, text)))),
    make("p", { class: "muted scales" }, scale()),
    make("details", { class: "prompt" }, make("summary", {}, "prompt"), make("pre", {}, data.prompt)),
  );
}

function silverWords(silver, data) {
  const titles = new Map();
  for (const one of data.trajectories) {
    for (const turn of one.turns) for (const document of turn.documents) titles.set(document.id, document.title);
  }
  const named = silver.map(([id, weight]) => `★ ${titles.get(id) ?? id} (${plain(weight, 2)})`);
  return `: ${named.join(", ")}`;
}

function hasLearner(data) {
  return data.trajectories.some((one) => one.turns.some((turn) => turn.learner_logprobs));
}

function shadeChoice(data) {
  const choices = [["advantage", "advantage"], ["surprise", "surprise (−log p)"]];
  if (hasLearner(data)) choices.push(["mismatch", "learner against sampler"]);
  const select = make("select", { id: "shade" }, choices.map(([value, label]) => make("option", { value }, label)));
  select.value = shading;
  select.addEventListener("input", () => {
    shading = select.value;
    find("detail").querySelector(".scales").replaceChildren(scale());
    for (const token of find("detail").querySelectorAll(".tokens .token")) token.className = shade(tokenFacts.get(token));
  });
  return make("label", { class: "shading" }, "shade ", select);
}

function trajectory(one, flags, isJudged) {
  const { sign, word, name } = outcome(flags, one.answer_score);
  const facts = Object.entries(one.metrics).map(([key, value]) => [term(key), ` ${plain(value)} · `]);
  return make(
    "article",
    { class: `card ${name}`, "data-index": one.index },
    make("header", { title: "link to this trajectory" },
      make("span", { class: `chip ${name}` }, sign),
      make("b", {}, `${one.index}`),
      make("span", { class: "word" }, word),
      make("span", { class: "score" }, term("score"), ` ${plain(one.answer_score)}`),
      make("span", { class: "number" }, term("advantage", signed(one.advantage_raw))),
    ),
    one.error && make("p", { class: "error" }, one.error),
    one.origin && make("p", { class: "muted" }, term(one.origin === "demonstration" ? "demonstration" : "continued", one.origin)),
    make("p", { class: "answer" }, one.answer === null ? "no answer" : make("span", {}, "answer: ", make("b", {}, one.answer))),
    make("p", { class: "muted" }, facts.flat(), term("policy"), ` ${one.policy_versions.join(", ") || "–"} · ${plain(one.seconds, 1)} s`),
    one.why && make("p", { class: "why" }, one.why),
    one.turns.map((turn, place) => turnBlock(turn, place, isJudged)),
  );
}

function turnBlock(turn, place, isJudged) {
  const marks = [
    turn.softened && ["softened", turn.advantage === 0 ? "softened to 0" : "softened"],
    turn.repeated && ["repeated", `repeats ${turn.repeated}`],
    turn.is_refused && ["refused", "refused"],
    ["length", "abort"].includes(turn.stop_reason) && ["cut", `cut: ${turn.stop_reason}`],
  ].filter(Boolean);
  const change = turn.advantage_raw === null || turn.advantage === turn.advantage_raw
    ? signed(turn.advantage) : `${signed(turn.advantage_raw)} → ${signed(turn.advantage)}`;
  return make(
    "section",
    { class: `turn ${NO_ACTIONS.includes(turn.kind) ? turn.kind : "action"}` },
    make("div", { class: "bar" },
      make("span", { class: "kind" }, `${place + 1} `, term(turn.kind)),
      isJudged && !NO_ACTIONS.includes(turn.kind) && turn.advantage_raw !== null && make("span", { class: "correctness" }, term("correctness"), ` ${plain(turn.correctness, 2)}`),
      marks.map(([kind, text]) => make("span", { class: `mark ${kind}` }, term(kind, text))),
      make("span", { class: "number" }, change),
    ),
    turn.calls.length > 0 && make("div", { class: "calls" }, turn.calls.map((call) => make("code", {}, call))),
    turn.flaw && make("p", { class: "flaw" }, `${FLAWS[turn.kind] ?? "Format"}: ${turn.flaw}.`),
    turn.why && (turn.brief
      ? make("details", { class: "why" }, make("summary", {}, turn.brief), make("p", {}, turn.why))
      : make("p", { class: "why" }, turn.why)),
    make("div", { class: "tokens" }, tokens(turn)),
    turn.observation.length > 0 && make("div", { class: "observation" }, turn.observation.map((part) => observed(part, turn))),
  );
}

function tokens(turn) {
  const elements = [];
  let ids = []; // of tokens that make a character together
  turn.pieces.forEach((piece, place) => {
    ids.push(turn.ids[place]);
    if (piece === "" && place < turn.pieces.length - 1) return;
    const facts = {
      piece, ids, advantage: turn.advantage, raw: turn.advantage_raw, logprob: turn.logprobs?.[place], learner: turn.learner_logprobs?.[place],
    };
    const element = make("span", {}, piece);
    element.className = shade(facts);
    tokenFacts.set(element, facts);
    elements.push(element);
    ids = [];
  });
  return elements;
}

function shade({ advantage, raw, logprob, learner }) {
  const sign = advantage > 0 ? "plus" : advantage < 0 ? "minus" : advantage === 0 && raw ? "zero spared" : "zero";
  if (shading === "surprise" && logprob != null) return `token ${sign} other shade${level(-logprob, SURPRISE)}`;
  if (shading === "mismatch" && logprob != null && learner != null) {
    return `token ${sign} other shade${level(Math.abs(learner - logprob), MISMATCH)}`;
  }
  return sign.startsWith("zero") ? `token ${sign}` : `token ${sign} shade${level(Math.abs(advantage), STEPS)}`;
}

function observed(part, turn) {
  if (part.document === null) return make("span", { class: "environment" }, part.text.trim());
  const document = turn.documents[part.document];
  const isSilver = document.weight !== null;
  const said = document.is_new ? ", new" : document.is_seen ? ", seen before" : "";
  return make(
    "details",
    { class: isSilver ? "document silver" : "document" },
    make("summary", {},
      make("span", { class: "title" }, document.title || document.id),
      isSilver && make("span", { class: "mark star" }, `★ silver ${plain(document.weight, 2)}${said}`),
      document.is_supporting && make("span", { class: "mark support" }, term("supports the answer")),
      make("span", { class: "excerpt" }, document.text),
    ),
    make("pre", {}, part.text.trim()),
    make("p", { class: "muted" }, `id ${document.id}${document.score === null ? "" : `, score ${plain(document.score)}`}`),
  );
}
