// The trajectory page: filters, list, group, keyboard.
import { showGroup, showNothing, focusTrajectory, legend } from "./detail.js";
import { find, make } from "./dom.js";
import { neighbour, scrollToChosen, setUpList, showList } from "./list.js";
import { SHOWS, countShows, filter, readIndex, stepMeans } from "./records.js";
import { readState, writeState } from "./state.js";
import { setUpTip } from "./tip.js";

let groups = [];
let listed = []; // groups that pass the filters, each with its matching trajectories
let state = readState();
let advantage = {};

async function load(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: ${(await answer.text()).slice(0, 500)}`);
  return answer.json();
}

function fail(error) {
  find("detail").replaceChildren(make("p", { id: "message", role: "alert" }, String(error.message)));
}

function setUpFilters() {
  const sources = [...new Set(groups.map((group) => group.source))].sort();
  find("show").replaceChildren(...Object.entries(SHOWS).map(([value, [label]]) => make("option", { value }, label)));
  find("source").replaceChildren(make("option", { value: "" }, "all"), ...sources.map((one) => make("option", { value: one }, one)));
  for (const name of ["text", "show", "source", "from", "to"]) {
    find(name).addEventListener("input", () => {
      const { value, type } = find(name);
      state[name] = type === "number" ? (value === "" ? null : Number(value)) : value;
      writeState(state, false);
      refresh();
    });
  }
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("reset").addEventListener("click", () => {
    Object.assign(state, { text: "", show: "", source: "", from: null, to: null });
    writeState(state, false);
    fillFilters();
    refresh();
  });
}

function fillFilters() {
  for (const name of ["text", "show", "source", "from", "to"]) find(name).value = state[name] ?? "";
}

function setUpSteps() {
  const bars = stepMeans(groups).map(({ step, mean }) => {
    const bar = make("i");
    bar.style.height = `${Math.round(100 * Math.max(mean, 0.02))}%`;
    return make(
      "button",
      { type: "button", class: "step", title: `step ${step}: mean score ${mean.toFixed(3)}`, "data-step": step, tabIndex: -1 },
      bar,
    );
  });
  find("steps").replaceChildren(...bars);
  find("steps").addEventListener("click", (event) => {
    const bar = event.target.closest(".step");
    if (!bar) return;
    const step = Number(bar.dataset.step);
    const isAlone = state.from === step && state.to === step;
    Object.assign(state, isAlone ? { from: null, to: null } : { from: step, to: step });
    writeState(state, false);
    fillFilters();
    refresh();
  });
}

function refresh() {
  const { found, number } = filter(groups, state);
  listed = found;
  showList(found, state.step, state.group);
  const trajectories = number === 1 ? "1 trajectory" : `${number} trajectories`;
  find("count").textContent = `${trajectories} in ${found.length === 1 ? "1 group" : `${found.length} groups`}`;
  for (const bar of find("steps").children) {
    const step = Number(bar.dataset.step);
    const isInside = step >= (state.from ?? 0) && step <= (state.to ?? Infinity);
    bar.classList.toggle("outside", !isInside);
  }
}

async function showState() {
  fillFilters();
  refresh();
  const isOpen = state.step !== null && state.group !== null;
  document.body.classList.toggle("open", isOpen);
  if (!isOpen) return showNothing(advantage, countShows(groups), chooseShow);
  scrollToChosen();
  const { step, group } = state;
  try {
    const transcript = await load(`data/group_${step}_${group}.json`);
    if (state.step !== step || state.group !== group) return; // another one was chosen meanwhile
    showGroup(transcript, groups.find((one) => one.step === step && one.group === group), advantage, chooseTrajectory);
    focusTrajectory(state.trajectory);
  } catch (error) {
    fail(error);
  }
}

function chooseGroup(group, trajectory = null) {
  if (!group) return;
  Object.assign(state, { step: group.step, group: group.group, trajectory });
  writeState(state, true);
  showState();
}

function chooseShow(show) {
  state.show = show;
  writeState(state, false);
  fillFilters();
  refresh();
}

function chooseTrajectory(index) {
  state.trajectory = index;
  writeState(state, false);
  focusTrajectory(index);
}

function leaveGroup() {
  Object.assign(state, { step: null, group: null, trajectory: null });
  writeState(state, true);
  showState();
}

function moveTrajectory(by) {
  const here = groups.find((one) => one.step === state.step && one.group === state.group);
  if (!here) return;
  // Those that pass the filters; all of a group that the list does not have.
  const matching = listed.find((one) => one.group === here)?.matching;
  const rows = here.rows.map((row) => row.index).filter((index) => !matching || matching.has(index));
  const place = here.rows.findIndex((row) => row.index === state.trajectory);
  const isAhead = (index) => Math.sign(here.rows.findIndex((row) => row.index === index) - place) === by;
  const ahead = rows.filter(isAhead);
  const next = place < 0 ? rows[0] : by > 0 ? ahead[0] : ahead.at(-1);
  if (next !== undefined) chooseTrajectory(next);
}

const KEYS = {
  j: () => chooseGroup(neighbour(1)),
  k: () => chooseGroup(neighbour(-1)),
  l: () => moveTrajectory(1),
  h: () => moveTrajectory(-1),
  "/": () => find("text").focus(),
  "?": () => find("help").showModal(),
  Escape: () => leaveGroup(),
};

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || find("help").open) return; // a dialog closes itself
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  find("keys").addEventListener("click", KEYS["?"]);
  find("detail").addEventListener("click", (event) => {
    if (event.target.closest(".back")) leaveGroup();
    if (event.target.closest(".next")) KEYS.j();
    if (event.target.closest(".previous")) KEYS.k();
  });
  find("help").querySelector(".legend").append(legend());
}

async function start() {
  const index = await load("data/index.json");
  groups = readIndex(index);
  advantage = index.advantage;
  find("name").textContent = index.name;
  document.title = `${index.name} · trajectories`;
  setUpFilters();
  setUpSteps();
  setUpList(chooseGroup);
  setUpKeys();
  setUpTip();
  // A change of the fragment fires this too: with "hashchange" beside it, a group would be drawn twice.
  window.addEventListener("popstate", () => {
    state = readState();
    showState();
  });
  const shown = showState();
  performance.mark("list");
  find("list").dataset.ready = "yes";
  await shown;
}

start().catch(fail);
