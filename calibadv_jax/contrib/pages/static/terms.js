// The words of the page, each explained where it stands (pointer) and in the help (?).
import { make } from "./dom.js";

export const TERMS = {
  group: "All trajectories of one question in one step: they are compared with each other.",
  score: "What a trajectory earned: the reward of its answer, 0 where the format is invalid, less penalties.",
  advantage: "How the sampled tokens are trained: positive makes them more likely, negative less likely. "
    + "Two numbers with an arrow: before and after the calibration.",
  "silver document": "A document that the best trajectories of the group saw (advantage.silver_threshold): a guess at what helps. "
    + "★ marks it with its weight; new: no earlier turn of the trajectory showed it.",
  correctness: "How well a search did, from 0 to 1: by default the share of its documents that are new silver documents.",
  softened: "The turn found silver documents, so its negative advantage was multiplied by 1 − correctness.",
  repeated: "The turn asked or found what an earlier turn of its trajectory had: its correctness is 0.",
  "answer turn": "The last sampled turn of a trajectory, whatever its kind. CalibAdv never softens it; it rebalances it.",
  rebalancing: "The answer turns of a group are rescaled until their negative and positive advantages stand in the ratio λ.",
  policy: "The version of the policy that sampled the tokens: 0 before the first step, N the one that step N made.",
  "supports the answer": "The question itself names this passage as one that answers it (supporting_ids).",
  invalid: "The turn holds no action that could be executed; the line below it says why.",
  unfinished: "The turn ended before its action was closed.",
  format: "1 where every turn is a thought and one action, and the last one a thought and an answer; else 0.",
  em: "Exact match: 1 where the answer equals an accepted answer after normalisation.",
  f1: "Overlap of the words of the answer with those of an accepted answer, from 0 to 1.",
  cover_em: "1 where an accepted answer occurs in the answer.",
  demonstration: "A trajectory from demonstrations.file, which the policy did not sample. Probabilities are the policy's own.",
  continued: "A trajectory of the second round (continuations): its first turns are those of a near miss, and are trained there.",
  refused: "The action did not take what was asked; the observation says so.",
  cut: "The turn was stopped from outside: length is a token limit, abort an interruption.",
  surprise: "−log probability of a token under the policy that sampled it, in nats.",
  "learner against sampler": "Difference of the two log-probabilities of a token: 0 where learner and sampler agree.",
};

// A word with its explanation, and a click leads to it in the help; plain text where there is none.
export function term(name, text = name) {
  return Object.hasOwn(TERMS, name) ? make("abbr", { class: "term", "data-term": name, title: TERMS[name] }, text) : text;
}

export const termId = (name) => `term-${name.replaceAll(" ", "-")}`;

export const termList = () => Object.entries(TERMS).flatMap(([name, text]) => [
  make("dt", { id: termId(name) }, name), make("dd", {}, text),
]);
