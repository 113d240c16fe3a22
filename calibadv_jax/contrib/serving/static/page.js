"use strict";
const byId = (id) => document.getElementById(id);
let model = "", running = null;

/** An element; texts are never markup. */
function make(tag, className, ...parts) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...parts);
  return element;
}

const headers = () => (byId("token").value ? { Authorization: `Bearer ${byId("token").value}` } : {});

async function loadModel() {
  const reply = await fetch("health");
  model = (await reply.json()).model;
  byId("model").textContent = model;
}

/** Offer questions until the first one is asked; without the token there are none yet. */
async function loadExamples() {
  const reply = await fetch("v1/examples", { headers: headers() });
  if (!reply.ok || byId("attempts").childElementCount) return;
  const { data } = await reply.json();
  for (const question of data) {
    const button = make("button", "", question);
    button.type = "button";
    button.addEventListener("click", () => {
      byId("question").value = question;
      byId("form").requestSubmit();
    });
    byId("examples").querySelector("ul").append(make("li", "", button));
  }
  byId("examples").hidden = data.length === 0;
}

function documentElement(document, number = "") {
  const title = make("span", "title", number + document.title);
  const summary = make("summary", "", title, make("span", "excerpt", document.text));
  return make("details", "document", summary, make("p", "", document.text));
}

/** The turns of an attempt; they stand below its answer. */
function traceOf(attempt) {
  let trace = attempt.querySelector(".trace");
  if (!trace) {
    trace = make("div", "trace", make("p", "muted", "Thoughts and searches"));
    attempt.append(trace);
  }
  return trace;
}

function showTurn(attempt, turn) {
  const trace = traceOf(attempt);
  if (turn.thought) trace.append(make("p", "thought", turn.thought));
  if (turn.query !== undefined) trace.append(make("p", "query", make("span", "muted", `${turn.kind}: `), turn.query));
  if (turn.text) trace.append(make("p", "problem", `${turn.kind} turn: ${turn.text}`));
  if (turn.words) trace.append(make("p", turn.refused ? "problem" : "muted", turn.words));
  (turn.documents || []).forEach((document, place) => trace.append(documentElement(document, `[${place + 1}] `)));
}

function showEnd(attempt, content, refusal, { documents, seconds }) {
  const result = make("div", content ? "result" : "result none", make("strong", "", content || refusal));
  const holding = documents.filter((document) => document.holds_answer);
  const sources = holding.length ? holding : documents;
  const label = holding.length ? "Documents that hold the answer" : "Documents that it read; none holds the answer in these words";
  if (content && sources.length) {
    result.append(make("p", "muted", label));
    result.append(...sources.map((document) => documentElement(document)));
  } else if (content) {
    result.append(make("p", "muted", "No document: answered from memory"));
  }
  result.append(make("p", "muted", `${seconds.toFixed(1)} s`));
  attempt.querySelector("h2").after(result);
  attempt.scrollIntoView({ block: "nearest" });
}

/** Yield the events of a stream of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) if (piece.startsWith("data: {")) yield JSON.parse(piece.slice(6));
  }
}

async function ask(question, attempt, signal) {
  const body = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: question }] });
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body, signal,
  });
  if (!reply.ok) {
    if (reply.status === 401) {
      byId("access").hidden = false;
      byId("token").focus();
      throw new Error("This service needs a token: type it above, and ask again.");
    }
    throw new Error((await reply.json()).error.message);
  }
  let content = "", refusal = "", isWhole = false;
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const { delta, finish_reason: reason } = event.choices[0];
    content += delta.content || "";
    refusal += delta.refusal || "";
    if (event.calibadv && event.calibadv.turn) showTurn(attempt, event.calibadv.turn);
    if (reason) {
      isWhole = true;
      showEnd(attempt, content, refusal, event.calibadv);
    }
  }
  if (!isWhole) throw new Error("The connection was lost before the answer.");
}

byId("form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running) return;
  running = new AbortController();
  const attempt = make("section", "attempt", make("h2", "", question));
  byId("attempts").prepend(attempt);
  byId("examples").hidden = true;
  byId("ask").hidden = true;
  byId("stop").hidden = false;
  byId("state").textContent = "The agent is working …";
  try {
    if (!model) await loadModel();
    await ask(question, attempt, running.signal);
    byId("state").textContent = "";
    if ([document.body, byId("question")].includes(document.activeElement)) {
      byId("question").focus({ preventScroll: true });
      byId("question").select();
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    const text = error.name === "TypeError" ? "The service cannot be reached." : error.message;
    byId("state").textContent = "";
    attempt.append(make("p", isStopped ? "muted" : "problem", isStopped ? "Stopped." : text));
  }
  running = null;
  byId("ask").hidden = false;
  byId("stop").hidden = true;
});
byId("stop").addEventListener("click", () => running && running.abort());
loadModel().then(loadExamples).catch(() => { byId("state").textContent = "The service cannot be reached."; });
