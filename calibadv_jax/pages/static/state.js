// What is shown, as the address says it: a copied link leads to the same view.

const NUMBERS = ["from", "to", "step", "group", "trajectory"];
const TEXTS = ["text", "show", "source"];

export function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of TEXTS) state[name] = given.get(name) ?? "";
  for (const name of NUMBERS) {
    const value = given.get(name);
    state[name] = value !== null && /^\d{1,9}$/.test(value) ? Number(value) : null;
  }
  return state;
}

export function writeState(state, isNewPlace) {
  const given = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) {
    if (state[name] !== null && state[name] !== "") given.set(name, state[name]);
  }
  const hash = `#${given}`;
  if (hash === location.hash) return;
  if (isNewPlace) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}
