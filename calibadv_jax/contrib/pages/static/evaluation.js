// The evaluations of the run: every question, before the training and after it.
import { find, make, plain } from "./dom.js";
import { answerChip } from "./list.js";
import { term } from "./terms.js";

const isRight = (result) => result?.outcome === "right";
const first = (question) => question.results.at(0);
const last = (question) => question.results.at(-1);

export const isGained = (question) => !isRight(first(question)) && isRight(last(question));
export const isLost = (question) => isRight(first(question)) && !isRight(last(question));

// Choices of "Show" in this view; with one evaluation, before and after are the same.
export const QUESTION_SHOWS = {
  "": ["all questions", () => true],
  gained: ["wrong before, right after", isGained],
  lost: ["right before, wrong after", isLost],
  right: ["right after", (question) => isRight(last(question))],
  wrong: ["wrong after", (question) => !isRight(last(question))],
};

export function readQuestions({ names, questions }) {
  const read = questions.map((question, number) => {
    const answers = question.results.map((result) => result?.answer ?? "");
    return { ...question, number, text: [question.question, ...question.golden, ...answers].join("\n").toLowerCase() };
  });
  return { names, questions: read };
}

export function filterQuestions({ names, questions }, state) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const [, passes] = QUESTION_SHOWS[state.show] ?? QUESTION_SHOWS[""];
  const passing = questions.filter((question) => (!state.source || question.source === state.source)
    && (!state.temperature || question.temperature === state.temperature)
    && words.every((word) => question.text.includes(word)) && passes(question));
  return {
    found: passing.map((question) => ({ question, names })),
    gained: passing.filter(isGained).length,
    lost: passing.filter(isLost).length,
  };
}

// Where no question is chosen: how many are right, by evaluation, temperature and data source.
export function showOverview({ names, questions }) {
  const kinds = new Map();
  for (const question of questions) {
    const key = `temperature ${question.temperature} · ${question.source}`;
    if (!kinds.has(key)) kinds.set(key, []);
    kinds.get(key).push(question);
  }
  const rows = [...kinds].sort().map(([key, members]) => {
    const shares = names.map((_, place) => members.filter((question) => isRight(question.results[place])).length / members.length);
    return make("tr", {}, make("th", { scope: "row" }, key), make("td", {}, `${members.length}`), shares.map((share) => make("td", {}, plain(share, 3))));
  });
  find("detail").replaceChildren(make("div", { id: "message" },
    make("p", {}, "Choose a question from the list, or press j."),
    make("table", {},
      make("thead", {}, make("tr", {}, ["questions", "number", ...names.map((name) => `right, ${name}`)].map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, rows)),
  ));
  find("detail").dataset.ready = "evaluation";
}

export function showQuestion(data) {
  const cards = data.names.map((name, place) => answerCard(name, data.answers[place], data.results[place]));
  find("detail").replaceChildren(
    make("header", { class: "group" },
      make("div", { class: "bar" },
        make("button", { type: "button", class: "back" }, "← list"),
        make("span", { class: "where" }, `${data.source} · ${data.id} · temperature ${data.temperature}`),
        make("button", { type: "button", class: "previous", title: "previous question (k)", "aria-label": "previous question" }, "↑"),
        make("button", { type: "button", class: "next", title: "next question (j)", "aria-label": "next question" }, "↓"),
        make("button", { type: "button", class: "words", title: "words and keys (?)", "aria-label": "words and keys" }, "?"),
      ),
      make("h2", {}, data.question),
      make("p", { class: "golden" }, "accepted: ", make("b", {}, data.golden.join(" | "))),
    ),
    make("div", { class: "columns" }, cards),
  );
  find("detail").dataset.ready = `question/${data.id}`;
  find("detail").scrollTop = 0;
}

function answerCard(name, answers, result) {
  const head = make("header", {}, answerChip(result, name), make("b", {}, name),
    result && make("span", { class: "number" }, term("f1", "F1"), ` ${plain(result.f1)}`));
  if (!answers) return make("article", { class: "card" }, head, make("p", { class: "muted" }, "This evaluation did not ask the question."));
  return make("article", { class: `card ${result.outcome}` }, head, answers.trajectories.map(attempt));
}

function attempt(trajectory) {
  const scores = Object.entries(trajectory.scores).flatMap(([key, value], place) => [place ? " · " : "", term(key), ` ${plain(value)}`]);
  return make("section", { class: "attempt" },
    trajectory.error && make("p", { class: "error" }, trajectory.error),
    make("p", { class: "answer" }, trajectory.answer === null ? "no answer" : make("span", {}, "answer: ", make("b", {}, trajectory.answer))),
    make("p", { class: "muted" }, scores),
    trajectory.turns.map(turn),
  );
}

function turn(data, place) {
  const isCut = ["length", "abort"].includes(data.stop_reason);
  return make("section", { class: `turn ${["answer", "invalid", "unfinished"].includes(data.kind) ? data.kind : "action"}` },
    make("div", { class: "bar" }, make("span", { class: "kind" }, `${place + 1} `, term(data.kind)),
      isCut && make("span", { class: "mark cut" }, term("cut", `cut: ${data.stop_reason}`)),
      make("span", { class: "number muted" }, `${data.tokens} tokens`)),
    make("div", { class: "tokens" }, data.text),
    data.observation.length > 0 && make("div", { class: "observation" }, data.observation.map(observed)),
  );
}

function observed(part) {
  if (part.document === null) return make("span", { class: "environment" }, part.text.trim());
  return make("details", { class: "document" },
    make("summary", {}, make("span", { class: "excerpt" }, part.text.trim())),
    make("pre", {}, part.text.trim()));
}
