// The trajectory page: filters, list, group, keyboard.
import { showGroup, showNothing, focusTrajectory, legend } from "./detail.js";
import { find, make } from "./dom.js";
import { neighbour, scrollToChosen, setUpList, showList } from "./list.js";
import { SHOWS, SORTS, countShows, filter, readIndex, stepMeans } from "./records.js";
import { readState, writeState } from "./state.js";
import { termId, termList } from "./terms.js";
import { setUpTip } from "./tip.js";

let groups = [];
let listed = []; // groups that pass the filters, each with its matching trajectories
let state = readState();
let advantage = {};
let run = { name: "", planned: 0, newest: 0, trouble: "" }; // its last two folders; steps to train; newest kept step; why it is not followed
let version = null; // of the index, as the server names it; null: its server names none

const LOOK = 2000; // milliseconds between two looks for new steps

const FILTERS = ["text", "show", "source", "sort", "from", "to"];
const NO_FILTERS = { text: "", show: "", source: "", sort: "", from: null, to: null, follow: "", run: "", unreadable: [] };

const groupHere = () => groups.find((one) => one.step === state.step && one.group === state.group);

async function request(address, options = {}) {
  const answer = await fetch(address, options).catch(() => {
    throw new Error("The server does not answer. Is calibadv inspect still running?");
  });
  if (answer.status === 304) return answer;
  if (answer.status === 404) throw new Error(`${address}: not kept any more (log.rollouts_keep). Load the page again.`);
  if (!answer.ok) throw new Error(`${address}: ${(await answer.text()).slice(0, 500)}`);
  return answer;
}

const load = async (address) => (await request(address)).json();

// Reads the index, unless it is the one that the page has.
async function loadIndex() {
  const headers = version ? { "If-None-Match": version } : {};
  const answer = await request("data/index.json", { headers, cache: "no-store" });
  if (answer.status === 304) return false;
  const index = await answer.json();
  version = answer.headers.get("ETag");
  groups = readIndex(index);
  advantage = index.advantage;
  run = { name: index.name, planned: index.planned, newest: index.steps.at(-1)?.step ?? 0, trouble: "" };
  return true;
}

function fail(error) {
  find("detail").replaceChildren(make("p", { id: "message", role: "alert" }, String(error.message)));
}

function fillSources() {
  const sources = ["", ...new Set(groups.map((group) => group.source))].sort();
  if (find("source").options.length === sources.length) return; // a list that is open stays open
  find("source").replaceChildren(...sources.map((value) => make("option", { value }, value || "all")));
  find("source").value = state.source;
}

function setUpFilters() {
  find("show").replaceChildren(...Object.entries(SHOWS).map(([value, [label]]) => make("option", { value }, label)));
  find("sort").replaceChildren(...Object.entries(SORTS).map(([value, [label]]) => make("option", { value }, label)));
  for (const name of FILTERS) {
    find(name).addEventListener("input", () => {
      const { value, type } = find(name);
      state[name] = type === "number" ? (value === "" ? null : Number(value)) : value;
      if (type === "number") state.follow = "";
      writeState(state, false);
      refresh();
    });
  }
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("reset").addEventListener("click", clearFilters);
}

function clearFilters() {
  Object.assign(state, NO_FILTERS, !groupHere() && { step: null, group: null, trajectory: null });
  writeState(state, false);
  showState();
}

function fillFilters() {
  for (const name of FILTERS) find(name).value = state[name] ?? "";
}

function showSteps() {
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
}

function setUpSteps() {
  find("steps").addEventListener("click", (event) => {
    const bar = event.target.closest(".step");
    if (!bar) return;
    const step = Number(bar.dataset.step);
    const isAlone = state.from === step && state.to === step;
    Object.assign(state, isAlone ? { from: null, to: null } : { from: step, to: step }, { follow: "" });
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
  const newest = state.follow ? ` · step ${run.newest} of ${run.planned}` : "";
  find("count").textContent = `${trajectories} in ${found.length === 1 ? "1 group" : `${found.length} groups`}${newest}`;
  showTrouble(found.length === 0);
  for (const bar of find("steps").children) {
    const step = Number(bar.dataset.step);
    const isInside = step >= (state.from ?? 0) && step <= (state.to ?? Infinity);
    bar.classList.toggle("outside", !isInside);
  }
}

// Why the list is empty, and what of the address leads nowhere.
function showTrouble(isEmpty) {
  const steps = groups.map((group) => group.step);
  const kept = `the steps that are kept go from ${steps[0]} to ${steps.at(-1)}`;
  const filters = [
    state.text && `text “${state.text}”`,
    state.show && `“${SHOWS[state.show]?.[0] ?? state.show}”`,
    state.source && `source ${state.source}`,
    (state.from !== null || state.to !== null) && `steps ${state.from ?? "first"} to ${state.to ?? "last"} (${kept})`,
  ].filter(Boolean);
  const button = make("button", { type: "button" }, "clear the filters");
  button.addEventListener("click", clearFilters);
  find("empty").hidden = !isEmpty;
  if (groups.length) find("empty").replaceChildren(`No trajectory passes the filters: ${filters.join(", ")}. `, button);
  else find("empty").replaceChildren("The run has kept no step yet. The first one appears here by itself.");
  const here = groupHere();
  const isMissing = state.step !== null && state.group !== null && !here;
  const dead = [
    run.trouble && `New steps do not appear: ${run.trouble}`,
    state.run && state.run !== run.name && `This page shows the run ${run.name}; the link is for ${state.run}: calibadv inspect its folder.`,
    isMissing && steps.length && `The run keeps no group ${state.group} of step ${state.step}; ${kept}.`,
    here && state.trajectory !== null && !here.rows.some((row) => row.index === state.trajectory)
      && `The group has no trajectory ${state.trajectory}.`,
    ...state.unreadable.map((text) => `The address holds ${text}, which is no number.`),
    state.show && !SHOWS[state.show] && `There is no choice “${state.show}” under Show: all are shown.`,
    state.sort && !SORTS[state.sort] && `There is no order “${state.sort}”.`,
  ].filter(Boolean);
  find("notice").hidden = dead.length === 0;
  find("notice").textContent = dead.join(" ");
}

// The list that follows a run has its newest step, or that of the open group, which stays where it is.
function followRun() {
  const step = groupHere()?.step ?? (run.newest || null);
  if (state.follow) Object.assign(state, { from: step, to: step });
}

async function showState() {
  followRun();
  fillFilters();
  refresh();
  const isOpen = groupHere() !== undefined;
  document.body.classList.toggle("open", isOpen);
  if (!isOpen) return showNothing(advantage, countShows(groups), chooseShow, run);
  scrollToChosen();
  const { step, group } = state;
  try {
    const transcript = await load(`data/group_${step}_${group}.json`);
    if (state.step !== step || state.group !== group) return; // another one was chosen meanwhile
    showGroup(transcript, groupHere(), chooseTrajectory);
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
  Object.assign(state, { show, from: null, to: null, follow: "" }); // its number is that of all steps
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
  find("list").focus({ preventScroll: true });
}

function moveTrajectory(by) {
  const here = groupHere();
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

// Where the list has the focus, or nothing has.
const LIST_KEYS = {
  ArrowDown: KEYS.j,
  ArrowUp: KEYS.k,
  PageDown: () => chooseGroup(neighbour(10)),
  PageUp: () => chooseGroup(neighbour(-10)),
  Home: () => chooseGroup(neighbour(-Infinity)),
  End: () => chooseGroup(neighbour(Infinity)),
  ArrowRight: KEYS.l,
  ArrowLeft: KEYS.h,
  Enter: () => {
    if (!document.body.classList.contains("open")) chooseGroup(neighbour(0));
    find("detail").focus({ preventScroll: true });
  },
};

function showTerm(name) {
  find("help").showModal();
  find(termId(name)).scrollIntoView();
}

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || find("help").open) return; // a dialog closes itself
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const isInList = event.target === find("list") || (event.target === document.body && !document.body.classList.contains("open"));
    const act = KEYS[event.key] ?? (isInList ? LIST_KEYS[event.key] : undefined);
    if (!act) return;
    if (isInList) find("list").focus({ preventScroll: true });
    event.preventDefault();
    act();
  });
  find("keys").addEventListener("click", KEYS["?"]);
  find("detail").addEventListener("click", (event) => {
    const word = event.target.closest("[data-term]");
    if (word) showTerm(word.dataset.term);
    if (event.target.closest(".words")) KEYS["?"]();
    if (event.target.closest(".back")) leaveGroup();
    if (event.target.closest(".next")) KEYS.j();
    if (event.target.closest(".previous")) KEYS.k();
  });
  find("help").querySelector(".legend").append(legend());
  find("help").querySelector(".terms").append(...termList());
}

// Looks for new steps; what is open, chosen, typed or has the focus stays.
async function look() {
  const before = run.trouble;
  let isNew = false;
  try {
    isNew = !document.hidden && (await loadIndex());
    run.trouble = "";
  } catch (error) {
    run.trouble = error.message;
  }
  if (isNew) {
    followRun();
    for (const name of ["from", "to"]) find(name).value = state[name] ?? "";
    fillSources();
    showSteps();
  }
  if (isNew || run.trouble !== before) refresh();
  const isIdle = !groupHere() && !find("detail").contains(document.activeElement);
  if (isNew && isIdle) showNothing(advantage, countShows(groups), chooseShow, run);
  if (run.newest < run.planned) setTimeout(look, LOOK);
}

async function start() {
  await loadIndex();
  if (location.hash.length < 2 && run.newest < run.planned) {
    state.follow = "newest"; // the address says so: the page, loaded again, follows the run
    writeState(state, false);
  }
  find("name").textContent = run.name;
  document.title = `${run.name} · trajectories`;
  setUpFilters();
  fillSources();
  setUpSteps();
  showSteps();
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
  if (version && run.newest < run.planned) setTimeout(look, LOOK);
  await shown;
}

start().catch(fail);
