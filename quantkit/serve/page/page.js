// The page: a conversation with the model, its settings, and what is shown of the model.

import { hasKey, loadModel, streamChat, useKey } from "./api.js";
import { certificateBody, factsLine, tiles } from "./certificate.js";
import { Renderer, made } from "./markdown.js";

const SETTINGS = "quantkit.settings";
const LIVE_MILLISECONDS = 250; // between two updates of an answer's speed
const NEAR_END = 80; // pixels: whoever reads further up is not scrolled

const at = (id) => document.getElementById(id);
const message = at("message");

let model = null;
let turns = []; // { question, answer, … } in their order
let running = null; // { turn, controller } of the answer that is streamed
let whenKeyIsKnown = null;

// ---- the model

async function showModel() {
  try {
    model = await loadModel();
  } catch (error) {
    const enter = error.status === 401 && (() => requireKey(showModel));
    const again = button(enter ? "Enter the key" : "Try again", enter || showModel);
    at("intro").replaceChildren(made("span", "problem", error.message), " ", again);
    if (enter) enter();
    return;
  }
  const about = model.quantkit ?? {};
  document.title = `${model.id} – quantkit`;
  at("name").textContent = model.id;
  const canChat = about.chat !== false;
  at("intro").textContent = canChat
    ? "Runs on this server. Nothing is sent elsewhere."
    : "This model has no chat template: it continues prompts at /v1/completions. To chat, start the server with --template.";
  at("composer").hidden = at("settings-open").hidden = !canChat;
  at("facts").textContent = factsLine(model);
  const found = tiles(model).map(([name, value, remark]) =>
    made("div", "", made("dt", "", name), made("dd", "", value, made("small", "", remark))));
  at("tiles").replaceChildren(...found);
  at("certificate-open").textContent = about.certificate ? "Certificate" : "More about the model";
  at("certificate-title").textContent = about.certificate ? "Certificate" : model.id;
  at("certificate-body").replaceChildren(...certificateBody(model));
  at("outgrown").hidden = !about.readers?.includes("vLLM");
  at("tiles").hidden = at("more").hidden = false;
}

// ---- the conversation

function send(question) {
  const turn = { question, article: made("article", "turn") };
  turn.article.append(made("h2", "hidden", "You"), made("p", "question", question));
  turns.push(turn);
  at("log").append(turn.article);
  at("welcome").hidden = true;
  at("facts").hidden = at("new").hidden = false;
  answer(turn);
}

async function answer(turn) {
  const view = newView(turn);
  const controller = new AbortController();
  running = { turn, controller };
  Object.assign(turn, { answer: "", reasoning: "" });
  showRunning(true);
  announce("The model answers.");
  toEnd();
  const clock = { began: performance.now(), first: 0, last: 0, pieces: 0 };
  const found = { usage: null, reason: null };
  let problem = null;
  try {
    for await (const event of streamChat(requestOf(turn), controller.signal)) {
      found.usage = event.usage ?? found.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      found.reason = choice.finish_reason ?? found.reason;
      const { content, reasoning_content: reasoning } = choice.delta;
      if (!content && !reasoning) continue;
      clock.last = performance.now();
      clock.first ||= clock.last;
      clock.pieces += 1;
      turn.answer += content ?? "";
      turn.reasoning += reasoning ?? "";
      view.update(clock);
    }
  } catch (error) {
    problem = error;
  } finally {
    running = null;
    showRunning(false);
  }
  view.end(clock, found, problem);
}

function requestOf(turn) {
  const { system, ...sampling } = settings();
  const before = turns.slice(0, turns.indexOf(turn)).filter((one) => one.answer);
  const messages = before.flatMap((one) => [
    { role: "user", content: one.question },
    { role: "assistant", content: one.answer },
  ]);
  const first = system ? [{ role: "system", content: system }] : [];
  const last = { role: "user", content: turn.question };
  return { ...sampling, ...(model && { model: model.id }), messages: [...first, ...messages, last] };
}

// What is seen of an answer; it replaces an earlier one.
function newView(turn) {
  for (const old of document.querySelectorAll(".again")) old.remove(); // only the last answer can be made again
  turn.view?.remove();
  const body = made("div", "answer");
  const meta = made("p", "meta");
  const view = (turn.view = made("div", "view", made("h2", "hidden", "Answer"), body, meta));
  turn.article.append(view);
  body.setAttribute("aria-busy", "true");
  const renderer = new Renderer(body);
  let reasoning = null;
  let drawn = 0;
  let updated = 0;

  function draw() {
    drawn = 0;
    const follow = isAtEnd();
    if (turn.reasoning) {
      reasoning ??= newReasoning(view, body);
      reasoning.text.textContent = turn.reasoning;
      reasoning.summary.textContent = turn.answer || !running ? "Reasoning" : "Reasoning …";
    }
    renderer.show(turn.answer);
    if (follow) toEnd();
  }

  return {
    update(clock) {
      drawn ||= requestAnimationFrame(draw);
      if (clock.last - updated < LIVE_MILLISECONDS) return;
      updated = clock.last;
      meta.textContent = speed(clock, null).join(" · ");
    },
    end(clock, { usage, reason }, problem) {
      cancelAnimationFrame(drawn);
      draw();
      body.removeAttribute("aria-busy");
      body.hidden = !turn.answer;
      const stopped = problem?.name === "AbortError";
      const notes = reason === "length" ? [limitText(usage)] : stopped ? ["Stopped."] : [];
      for (const note of notes) body.after(made("p", "note", note));
      if (problem && !stopped) {
        body.after(made("p", "problem", problem.message));
        if (problem.status === 401) requireKey(() => answer(turn));
      }
      meta.replaceChildren(...actions(turn, problem && !stopped), speed(clock, usage).join(" · "));
      toEndIfNear();
      announce([turn.answer, ...notes, stopped ? "" : problem?.message].filter(Boolean).join("\n"));
    },
  };
}

function newReasoning(view, body) {
  const found = { summary: made("summary", ""), text: made("div", "thoughts") };
  view.insertBefore(made("details", "reasoning", found.summary, found.text), body);
  return found;
}

function actions(turn, failed) {
  const again = button(failed ? "Try again" : "Regenerate", () => !running && answer(turn));
  again.classList.add("again");
  const copy = button("Copy", () => copyText(turn.answer, copy));
  return turn.answer ? [copy, again] : [again];
}

function speed({ began, first, last, pieces }, usage) {
  if (!pieces) return [];
  const number = usage?.completion_tokens ?? pieces; // a piece is a token, but for letters of several tokens
  const rate = number > 1 && last > first ? [`${((1000 * (number - 1)) / (last - first)).toFixed(1)} tokens/s`] : [];
  return [...(usage ? [`${number} tokens`] : []), ...rate, `first token ${((first - began) / 1000).toFixed(2)} s`];
}

function limitText(usage) {
  if (!usage) return "Stopped at the limit.";
  const full = usage.total_tokens >= model?.max_model_len;
  if (full) return `Stopped: the context of ${model.max_model_len} tokens is full. Start a new chat.`;
  return `Stopped at the limit of ${usage.completion_tokens} tokens.`;
}

function stop() {
  running?.controller.abort();
}

function newChat() {
  stop();
  turns = [];
  at("log").replaceChildren();
  at("welcome").hidden = false;
  at("facts").hidden = at("new").hidden = true;
  announce("New chat.");
  message.focus();
}

// One of the two buttons is shown. The focus stays on whichever that is.
function showRunning(is) {
  const [shown, hidden] = is ? [at("stop"), at("send")] : [at("send"), at("stop")];
  const focused = document.activeElement === hidden || (is && document.activeElement === document.body);
  shown.hidden = false;
  hidden.hidden = true;
  if (focused) shown.focus();
}

// ---- settings

function fields() {
  return [...at("settings-form").elements].filter((one) => one.name);
}

// Those that are not empty, as the API has them.
function settings() {
  const set = fields().filter((one) => one.value.trim() !== "");
  return Object.fromEntries(set.map((one) => [one.name, one.type === "number" ? Number(one.value) : one.value]));
}

function restoreSettings() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    // none, or a browser that stores nothing
  }
  for (const one of fields()) one.value = stored[one.name] ?? "";
  countSettings();
}

function storeSettings() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings()));
  } catch {
    // kept in the fields
  }
  countSettings();
}

function countSettings() {
  const number = Object.keys(settings()).length;
  at("settings-open").textContent = number ? `Settings (${number})` : "Settings";
}

function settingsAreValid() {
  const wrong = fields().find((one) => !one.checkValidity());
  for (const one of fields()) one.toggleAttribute("aria-invalid", one === wrong);
  wrong?.setAttribute("aria-invalid", "true");
  const problem = at("settings-problem");
  problem.hidden = !wrong;
  problem.textContent = wrong ? `${wrong.labels[0].textContent}: ${wrong.validationMessage}` : "";
  wrong?.focus();
  return !wrong;
}

// ---- the key

function requireKey(then) {
  at("key-problem").hidden = !hasKey();
  whenKeyIsKnown = then;
  at("key-value").value = "";
  at("key").showModal();
}

// ---- helpers

function button(name, act) {
  const found = made("button", "quiet", name);
  found.type = "button";
  found.addEventListener("click", act);
  return found;
}

async function copyText(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text);
  }
  from.textContent = "Copied";
  announce("Copied.");
  setTimeout(() => (from.textContent = "Copy"), 1500);
}

// Browsers have a clipboard for pages of this machine and of https only.
function copyBySelection(text) {
  const focused = document.activeElement;
  const area = made("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

function announce(text) {
  at("status").textContent = text;
}

function isAtEnd() {
  const root = document.scrollingElement;
  return root.scrollHeight - root.scrollTop - root.clientHeight < NEAR_END;
}

function toEnd() {
  window.scrollTo({ top: document.scrollingElement.scrollHeight });
}

function toEndIfNear() {
  if (isAtEnd()) toEnd();
}

function fit() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

// ---- events

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = message.value.trim();
  if (running) return;
  if (!question) return message.focus();
  message.value = "";
  fit();
  send(question);
});
message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) stop();
});
at("stop").addEventListener("click", (event) => event.detail < 2 && stop()); // not by a double click on Send
at("new").addEventListener("click", newChat);
at("log").addEventListener("click", ({ target }) => {
  if (target.matches(".copy-code")) copyText(target.closest(".code").querySelector("pre").textContent, target);
});

for (const id of ["facts", "certificate-open"]) at(id).addEventListener("click", () => at("certificate").showModal());
at("certificate-close").addEventListener("click", () => at("certificate").close());

at("settings-open").addEventListener("click", () => at("settings").showModal());
at("settings-form").addEventListener("input", storeSettings);
at("settings-form").addEventListener("reset", () => setTimeout(() => settingsAreValid() && storeSettings()));
at("settings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (settingsAreValid()) at("settings").close();
});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key-value").value.trim());
  at("key").close();
  if (!model && whenKeyIsKnown !== showModel) showModel();
  whenKeyIsKnown();
});
at("key-cancel").addEventListener("click", () => at("key").close());

restoreSettings();
showModel();
