// What is shown, as the address says it: a copied link leads to the same view.

const NUMBERS = ["from", "to", "step", "group", "trajectory"];
const TEXTS = ["text", "show", "source", "sort", "run", "follow"];

export function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = { unreadable: [] }; // numbers of the address that are none
  for (const name of TEXTS) state[name] = given.get(name) ?? "";
  for (const name of NUMBERS) {
    const value = given.get(name);
    const isNumber = /^\d{1,9}$/.test(value ?? "");
    state[name] = isNumber ? Number(value) : null;
    if (value && !isNumber) state.unreadable.push(`${name}=${value}`);
  }
  return state;
}

export function writeState(state, isNewPlace) {
  const given = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) {
    const isFollowed = state.follow && (name === "from" || name === "to"); // they change with the newest step
    if (state[name] !== null && state[name] !== "" && !isFollowed) given.set(name, state[name]);
  }
  const hash = `#${given}`;
  if (hash === location.hash) return;
  if (isNewPlace) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}
