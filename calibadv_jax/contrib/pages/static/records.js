// The index of all trajectories, and its filters.

import { plain } from "./dom.js";

// As calibadv_jax/contrib/pages/site.py writes them.
export const FLAGS = {
  failed: 1, formatInvalid: 2, invalid: 4, unfinished: 8, wrong: 16, goodSearch: 32, softened: 64, repeated: 128,
};

// Kinds of turns that ask for nothing; every other kind is the name of an action.
export const NO_ACTIONS = ["answer", "invalid", "unfinished"];

const has = (flags, bits) => (flags & bits) !== 0;

export const SHOWS = {
  "": ["all trajectories", () => true],
  "wrong-good": ["wrong answer, good search", (flags) => has(flags, FLAGS.wrong) && has(flags, FLAGS.goodSearch)],
  right: ["right answer", (flags) => !has(flags, FLAGS.wrong | FLAGS.failed)],
  wrong: ["wrong answer", (flags) => has(flags, FLAGS.wrong)],
  softened: ["softened turn", (flags) => has(flags, FLAGS.softened)],
  repeated: ["repeated search", (flags) => has(flags, FLAGS.repeated)],
  invalid: ["invalid turn or format", (flags) => has(flags, FLAGS.invalid | FLAGS.formatInvalid)],
  unfinished: ["cut by a length limit", (flags) => has(flags, FLAGS.unfinished)],
  failed: ["failed", (flags) => has(flags, FLAGS.failed)],
};

// Label, and what the mean over a group's trajectories is taken of; a sign for the order.
export const SORTS = {
  "": ["order of the run"],
  "reward-high": ["highest reward", "score", -1],
  "reward-low": ["lowest reward", "score", 1],
  long: ["longest", "length", -1],
  short: ["shortest", "length", 1],
  "searches-many": ["most searches", "searches", -1],
  "searches-few": ["fewest searches", "searches", 1],
};

// Groups in the order of the run; each holds its trajectories.
export function readIndex(index) {
  const groups = [];
  for (const { step, groups: named, rows } of index.steps) {
    const first = groups.length;
    named.group.forEach((group, place) => {
      const question = named.question[place];
      const golden = named.golden[place];
      const text = `${question}\n${golden.join("\n")}`.toLowerCase();
      groups.push({ step, group, question, golden, text, source: named.source[place], silver: named.silver[place], rows: [] });
    });
    rows.group.forEach((place, row) => {
      const text = `${rows.answer[row] ?? ""}\n${rows.queries[row]}`.toLowerCase();
      groups[first + place].rows.push({
        index: rows.index[row], score: rows.score[row], flags: rows.flags[row], advantage: rows.advantage[row],
        searches: rows.searches[row], length: rows.length[row], answer: rows.answer[row], text,
      });
    });
  }
  return groups;
}

// Groups with at least one trajectory that passes all filters, and which trajectories these are.
export function filter(groups, state) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const [, passes] = SHOWS[state.show] ?? SHOWS[""];
  const found = [];
  let number = 0;
  for (const group of groups) {
    if (state.from !== null && group.step < state.from) continue;
    if (state.to !== null && group.step > state.to) continue;
    if (state.source && group.source !== state.source) continue;
    const open = words.filter((word) => !group.text.includes(word));
    const matching = new Set();
    for (const row of group.rows) {
      if (passes(row.flags) && open.every((word) => row.text.includes(word))) matching.add(row.index);
    }
    if (matching.size) {
      found.push({ group, matching, sorted: null });
      number += matching.size;
    }
  }
  sort(found, state.sort);
  return { found, number };
}

// By the mean over the trajectories that pass; `sorted` of an entry says it.
function sort(found, name) {
  const [, field, sign] = SORTS[name] ?? SORTS[""];
  if (!field) return;
  const means = new Map(found.map((entry) => {
    const values = entry.group.rows.filter((row) => entry.matching.has(row.index)).map((row) => row[field]);
    return [entry, values.reduce((sum, value) => sum + value, 0) / values.length];
  }));
  found.sort((a, b) => sign * (means.get(a) - means.get(b)));
  const unit = { score: "score", length: "tokens", searches: "searches" }[field];
  for (const [entry, mean] of means) entry.sorted = `${unit} ${plain(mean, 2)}`;
}

// How many trajectories each choice of "Show" has: [value, label, number].
export function countShows(groups) {
  const all = groups.flatMap((group) => group.rows);
  return Object.entries(SHOWS).map(([value, [label, passes]]) => [value, label, all.filter((row) => passes(row.flags)).length]);
}

// Mean score of the finished trajectories of each step.
export function stepMeans(groups) {
  const sums = new Map();
  for (const group of groups) {
    const sum = sums.get(group.step) ?? { score: 0, number: 0 };
    sums.set(group.step, sum);
    for (const row of group.rows) {
      if (has(row.flags, FLAGS.failed)) continue;
      sum.score += row.score;
      sum.number += 1;
    }
  }
  return [...sums].map(([step, { score, number }]) => ({ step, mean: number ? score / number : 0 }));
}

// A sign and a word for how a trajectory ended; the sign is readable without colour.
export const OUTCOMES = {
  failed: { sign: "–", word: "failed", name: "failed" },
  invalid: { sign: "!", word: "invalid format", name: "invalid" },
  right: { sign: "✓", word: "right", name: "right" },
  partly: { sign: "~", word: "partly right", name: "partly" },
  wrong: { sign: "✗", word: "wrong", name: "wrong" },
};

export function outcome(flags, score) {
  if (has(flags, FLAGS.failed)) return OUTCOMES.failed;
  if (has(flags, FLAGS.formatInvalid)) return OUTCOMES.invalid;
  if (!has(flags, FLAGS.wrong)) return OUTCOMES.right;
  return score > 0 ? OUTCOMES.partly : OUTCOMES.wrong;
}
