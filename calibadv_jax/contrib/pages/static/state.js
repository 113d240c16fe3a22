// What is shown, as the address says it: a copied link leads to the same view.

const NUMBERS = ["from", "to", "step", "group", "trajectory", "question"];
const TEXTS = ["view", "text", "show", "source", "temperature", "sort", "run", "follow"];

export function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  // unreadable: numbers of the address that are none; isAutomatic: whether the page itself opened the group of a
  // run in progress, so that the list goes on to follow it.
  const state = { unreadable: [], isAutomatic: false };
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
  const changing = state.follow ? ["from", "to"] : []; // they change with the newest step
  if (state.isAutomatic) changing.push("step", "group", "trajectory");
  for (const name of [...TEXTS, ...NUMBERS]) {
    const isFollowed = changing.includes(name);
    if (state[name] !== null && state[name] !== "" && !isFollowed) given.set(name, state[name]);
  }
  const hash = `#${given}`;
  if (hash === location.hash) return;
  if (isNewPlace) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}
