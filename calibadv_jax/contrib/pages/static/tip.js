// What is known of the token under the pointer.
import { find, make, plain, signed } from "./dom.js";

export const tokenFacts = new WeakMap(); // element -> its facts

export function setUpTip() {
  const tip = find("tip");
  find("detail").addEventListener("pointerover", (event) => {
    const facts = tokenFacts.get(event.target);
    tip.hidden = !facts;
    if (!facts) return;
    tip.replaceChildren(...lines(facts).map((line) => make("div", {}, line)));
    const place = event.target.getBoundingClientRect();
    const left = Math.min(place.left, innerWidth - tip.offsetWidth - 8);
    const below = place.bottom + 6;
    const isRoom = below + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${isRoom ? below : place.top - tip.offsetHeight - 6}px`;
  });
  find("detail").addEventListener("pointerleave", () => { tip.hidden = true; });
  find("detail").addEventListener("scroll", () => { tip.hidden = true; }, { capture: true, passive: true });
}

function lines({ piece, ids, advantage, logprob, learner }) {
  const said = [
    `${JSON.stringify(piece)}  id ${ids.join(" + ")}`,
    `advantage ${signed(advantage)}`,
    logprob === null || logprob === undefined ? "" : `probability ${plain(Math.exp(logprob))} (log ${signed(logprob)})`,
  ];
  if (learner !== null && learner !== undefined && logprob !== null) {
    said.push(`learner: log ${signed(learner)}, ratio ${plain(Math.exp(learner - logprob))}`);
  }
  return said.filter(Boolean);
}
