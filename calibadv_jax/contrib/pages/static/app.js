// The trajectory page: filters, list, group, keyboard.
import { showGroup, showNothing, focusTrajectory, legend } from "./detail.js";
import { find, make, plain } from "./dom.js";
import { QUESTION_SHOWS, filterQuestions, readQuestions, showOverview, showQuestion } from "./evaluation.js";
import { neighbour, scrollToChosen, setUpList, showList } from "./list.js";
import { SHOWS, SORTS, countShows, filter, readIndex, stepMeans } from "./records.js";
import { readState, writeState } from "./state.js";
import { termId, termList } from "./terms.js";
import { setUpTip } from "./tip.js";

let groups = [];
let evaluation = { names: [], questions: [] }; // of data/evaluations.json
let listed = []; // groups that pass the filters, each with its matching trajectories
let state = readState();
let advantage = {};
// Its last two folders; steps to train; newest kept step; group and trajectory to open of it; names of its evaluations; why it is
// not followed.
let run = { name: "", planned: 0, newest: 0, instructive: {}, evaluations: [], trouble: "" };
let version = null; // of the index, as the server names it; null: its server names none

const LOOK = 2000; // milliseconds between two looks for new steps

const FILTERS = ["text", "show", "source", "temperature", "sort", "from", "to"];
const NO_FILTERS = { text: "", show: "", source: "", temperature: "", sort: "", from: null, to: null, follow: "", run: "", unreadable: [] };

const isEvaluation = () => state.view === "evaluation";
const questionHere = () => evaluation.questions[state.question ?? -1];
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
  const { step = 0, instructive = {} } = index.steps.at(-1) ?? {};
  run = { name: index.name, planned: index.planned, newest: step, instructive, evaluations: index.evaluations, trouble: "" };
  return true;
}

function fail(error) {
  find("detail").replaceChildren(make("p", { id: "message", role: "alert" }, String(error.message)));
}

function fillSources() {
  const entries = isEvaluation() ? evaluation.questions : groups;
  fillChoices("source", entries.map((entry) => entry.source));
  fillChoices("temperature", evaluation.questions.map((question) => question.temperature));
}

function fillChoices(name, values) {
  const choices = ["", ...new Set(values)].sort();
  const present = [...find(name).options].map((option) => option.value);
  if (present.join("\n") === choices.join("\n")) return; // a list that is open stays open
  find(name).replaceChildren(...choices.map((value) => make("option", { value }, value || "all")));
  find(name).value = state[name];
}

function fillShows() {
  const shows = isEvaluation() ? QUESTION_SHOWS : SHOWS;
  find("show").replaceChildren(...Object.entries(shows).map(([value, [label]]) => make("option", { value }, label)));
  find("show").value = state.show;
}

function setUpFilters() {
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

function setUpViews() {
  find("views").addEventListener("click", (event) => {
    const view = event.target.closest("button")?.dataset.view;
    if (view === undefined || view === state.view) return;
    Object.assign(state, NO_FILTERS, { view, question: null, isAutomatic: false });
    showView().then(() => {
      if (isEvaluation()) state.temperature = evaluation.questions[0]?.temperature ?? "";
      writeState(state, true);
      showState();
    }, fail);
  });
}

// What belongs to the chosen view: its filters, and its choices.
async function showView() {
  find("views").hidden = run.evaluations.length === 0;
  for (const button of find("views").children) button.setAttribute("aria-pressed", button.dataset.view === state.view);
  document.body.classList.toggle("evaluation", isEvaluation());
  if (isEvaluation() && evaluation.names.join("\n") !== run.evaluations.join("\n")) {
    evaluation = readQuestions(await load("data/evaluations.json"));
  }
  fillShows();
  fillSources();
}

function clearFilters() {
  Object.assign(state, NO_FILTERS, !groupHere() && { step: null, group: null, trajectory: null }, { isAutomatic: false });
  writeState(state, false);
  showState();
}

function fillFilters() {
  for (const name of FILTERS) find(name).value = state[name] ?? "";
}

function showSteps() {
  const means = stepMeans(groups);
  const top = Math.max(1, ...means.map(({ mean }) => mean));
  find("chart").hidden = means.length === 0;
  find("scale-top").textContent = plain(top, 1);
  find("first-step").textContent = `step ${means.at(0)?.step}`;
  find("last-step").textContent = means.length > 1 ? `step ${means.at(-1).step}` : "";
  const bars = means.map(({ step, mean }) => {
    const bar = make("i");
    bar.style.height = `${Math.round(100 * Math.max(mean / top, 0.02))}%`;
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
  if (isEvaluation()) return refreshQuestions();
  const { found, number } = filter(groups, state);
  listed = found;
  showList(found, ({ group }) => group.step === state.step && group.group === state.group);
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

function refreshQuestions() {
  const { found, gained, lost } = filterQuestions(evaluation, state);
  showList(found, ({ question }) => question.number === state.question);
  const changes = evaluation.names.length > 1 ? ` · ${gained} gained, ${lost} lost` : "";
  // At several temperatures every question has several answers.
  const kind = state.temperature || find("temperature").options.length < 3 ? "question" : "answer";
  find("count").textContent = `${found.length} ${kind}${found.length === 1 ? "" : "s"}${changes}`;
  find("empty").hidden = found.length > 0;
  find("empty").replaceChildren("No question passes the filters.");
  find("notice").hidden = true;
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
  const opened = state.isAutomatic ? undefined : groupHere();
  const step = opened?.step ?? (run.newest || null);
  if (state.follow) Object.assign(state, { from: step, to: step });
}

async function showState() {
  followRun();
  try {
    await showView();
  } catch (error) {
    return fail(error);
  }
  fillFilters();
  refresh();
  const isOpen = (isEvaluation() ? questionHere() : groupHere()) !== undefined;
  document.body.classList.toggle("open", isOpen);
  if (isEvaluation()) return isOpen ? showChosenQuestion() : showOverview(evaluation);
  if (!isOpen) return showNothing(advantage, countShows(groups), chooseShow, run);
  scrollToChosen();
  const { step, group } = state;
  try {
    const transcript = await load(`data/group_${step}_${group}.json`);
    if (isEvaluation() || state.step !== step || state.group !== group) return; // another one was chosen meanwhile
    showGroup(transcript, groupHere(), chooseTrajectory);
    focusTrajectory(state.trajectory);
  } catch (error) {
    fail(error);
  }
}

async function showChosenQuestion() {
  scrollToChosen();
  const { number } = questionHere();
  try {
    const answers = await load(`data/question_${number}.json`);
    if (isEvaluation() && state.question === number) showQuestion(answers);
  } catch (error) {
    fail(error);
  }
}

// An entry of the list.
function choose(entry, trajectory = null) {
  if (!entry) return;
  if (entry.group) return chooseGroup(entry.group, trajectory);
  state.question = entry.question.number;
  writeState(state, true);
  showState();
}

function chooseGroup(group, trajectory = null) {
  Object.assign(state, { step: group.step, group: group.group, trajectory, isAutomatic: false });
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
  Object.assign(state, { trajectory: index, isAutomatic: false });
  writeState(state, false);
  focusTrajectory(index);
}

function leaveGroup() {
  Object.assign(state, isEvaluation() ? { question: null } : { step: null, group: null, trajectory: null, isAutomatic: false });
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
  j: () => choose(neighbour(1)),
  k: () => choose(neighbour(-1)),
  l: () => moveTrajectory(1),
  h: () => moveTrajectory(-1),
  "/": () => find("text").focus(),
  "?": () => showHelp(),
  Escape: () => leaveGroup(),
};

// Where the list has the focus, or nothing has.
const LIST_KEYS = {
  ArrowDown: KEYS.j,
  ArrowUp: KEYS.k,
  PageDown: () => choose(neighbour(10)),
  PageUp: () => choose(neighbour(-10)),
  Home: () => choose(neighbour(-Infinity)),
  End: () => choose(neighbour(Infinity)),
  ArrowRight: KEYS.l,
  ArrowLeft: KEYS.h,
  Enter: () => {
    if (!document.body.classList.contains("open")) choose(neighbour(0));
    find("detail").focus({ preventScroll: true });
  },
};

function showHelp() {
  find("help").showModal();
  find("help").scrollTop = 0; // the dialog has the focus, and begins at its top
}

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
  if (isNew && !groupHere() && !isEvaluation() && groups.length && state.step === null && state.isAutomatic) openInstructive();
  if (isNew) {
    followRun();
    for (const name of ["from", "to"]) find(name).value = state[name] ?? "";
    fillSources();
    showSteps();
  }
  if (isNew || run.trouble !== before) refresh();
  find("views").hidden = run.evaluations.length === 0;
  const isIdle = !isEvaluation() && !groupHere() && !find("detail").contains(document.activeElement);
  if (isNew && isIdle) showNothing(advantage, countShows(groups), chooseShow, run);
  if (run.newest < run.planned) setTimeout(look, LOOK);
}

// Opens what the newest step shows best. The group of a run in progress is not in the address, which follows the run.
function openInstructive() {
  Object.assign(state, { step: run.newest, ...run.instructive, isAutomatic: Boolean(state.follow) });
  writeState(state, false);
  showState();
}

// Where the address names nothing to show.
function chooseStart() {
  if (run.newest < run.planned) state.follow = "newest"; // the address says so: the page, loaded again, follows the run
  Object.assign(state, { isAutomatic: Boolean(state.follow) });
  if (groups.length) Object.assign(state, { step: run.newest, ...run.instructive });
  else if (run.evaluations.length && !state.follow) state.view = "evaluation";
  writeState(state, false);
}

async function start() {
  await loadIndex();
  const isBare = location.hash.length < 2 || location.hash === "#follow=newest";
  if (isBare) chooseStart();
  find("name").textContent = run.name;
  document.title = `${run.name} · trajectories`;
  setUpFilters();
  setUpViews();
  setUpSteps();
  showSteps();
  setUpList(choose);
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
