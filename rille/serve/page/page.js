// The built-in page: a conversation over /v1/chat/completions, and the engine's figures from /figures.
//
//   messages  ->  POST, read as events  ->  thinking, answer, calls  ->  results from the person  ->  ...
//
// The list of messages is the whole state. Text only ever becomes text nodes: nothing that a model writes is markup here.

const at = (id) => document.getElementById(id);
const MISSES = ["cold", "evicted", "no_checkpoint", "below_unit", "draft"];
const SECONDS = 120;
const CELLS = 256;

let messages = [];
let pictures = [];
let running = null; // AbortController of the reply that is being written

function element(parent, tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(text);
  parent.append(made);
  return made;
}

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// --- the conversation ---

function request() {
  const system = at("system").value.trim();
  const tools = at("tools").value.trim();
  const effort = at("effort").value;
  const longest = Number(at("longest").value);
  return {
    model: at("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    tools: tools ? JSON.parse(tools) : undefined,
    thinking: effort === "none" ? { type: "disabled" } : { type: "enabled", effort },
    temperature: at("temperature").value === "" ? undefined : Number(at("temperature").value),
    max_tokens: longest || undefined,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function view() {
  const box = element(at("talk"), "div", "message assistant");
  const parts = { box, thinking: null, answer: null, calls: [] };
  return {
    thinking(text) {
      if (!text) return;
      if (!parts.thinking) {
        const details = element(box, "details", "thinking");
        details.open = true;
        element(details, "summary", "", "Thinking");
        parts.thinking = element(details, "pre", "");
      }
      parts.thinking.append(text);
    },
    answer(text) {
      if (!text) return;
      parts.answer ??= element(box, "div", "answer");
      parts.answer.append(text);
    },
    call(index, name, text) {
      parts.calls[index] ??= element(element(box, "div", "call", `${name}`), "pre", "");
      parts.calls[index].append(text);
      return parts.calls[index].parentElement;
    },
    callBox: (index) => parts.calls[index].parentElement,
    note: (text, kind = "note") => element(box, "div", kind, text),
  };
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status} ${response.statusText}`; // of something between the server and us
  }
}

// Whether the server has taken the request.
async function reply() {
  const talk = messages; // of this conversation; a new one has nothing of it
  const shown = view();
  const said = { role: "assistant", content: "" };
  const started = performance.now();
  let usage = null;
  let reason = null;
  let taken = false;
  running = new AbortController();
  busy(true);
  try {
    const body = JSON.stringify(request());
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body, signal: running.signal });
    if (!response.ok) throw new Error(await complaint(response));
    taken = true;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const follows = at("talk").scrollHeight - at("talk").scrollTop - at("talk").clientHeight < 50;
      for (const { delta, finish_reason } of event.choices) {
        reason = finish_reason ?? reason;
        take(delta, said, shown);
      }
      if (follows) at("talk").scrollTop = at("talk").scrollHeight; // else somebody reads what is further up
    }
  } catch (error) {
    if (error.name !== "AbortError") shown.note(error.message, "wrong");
    else reason = "stopped";
  } finally {
    running = null;
    busy(false);
  }
  if (reason !== "tool_calls") delete said.tool_calls; // they were cut off
  if (said.content || said.reasoning_content || said.tool_calls) talk.push(said);
  if (usage) shown.note(summary(usage, reason, (performance.now() - started) / 1000));
  if (said.tool_calls && talk === messages) askForResults(said.tool_calls, shown);
  return taken;
}

function take(delta, said, shown) {
  if (delta.reasoning_content !== undefined) said.reasoning_content = (said.reasoning_content ?? "") + delta.reasoning_content;
  said.content += delta.content ?? "";
  shown.thinking(delta.reasoning_content);
  shown.answer(delta.content);
  for (const call of delta.tool_calls ?? []) {
    said.tool_calls ??= [];
    if (call.id) said.tool_calls[call.index] = { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
    const whole = said.tool_calls[call.index].function;
    whole.arguments += call.function.arguments;
    shown.call(call.index, whole.name, call.function.arguments);
  }
}

function summary(usage, reason, seconds) {
  const speed = (usage.completion_tokens / seconds).toFixed(1);
  const why = { length: "cut at the limit; ", stopped: "stopped; " }[reason] ?? "";
  return `${why}${usage.completion_tokens} tokens, ${speed} a second; ${usage.cached_tokens} of ${usage.prompt_tokens} of the prompt cached`;
}

function askForResults(calls, shown) {
  const left = new Set(calls.map((call) => call.id));
  calls.forEach((call, index) => {
    const form = element(shown.callBox(index), "form", "result");
    const field = element(form, "textarea", "");
    field.placeholder = `The result of ${call.function.name}`;
    element(form, "button", "", "Give");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
      form.replaceWith(document.createTextNode(field.value));
      left.delete(call.id);
      if (!left.size) reply();
    });
  });
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

async function say(text) {
  for (const form of at("talk").querySelectorAll(".result")) form.remove(); // results would come too late now
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  const said = { role: "user", content: parts.length ? [...parts, { type: "text", text }] : text };
  const talk = messages;
  talk.push(said);
  const box = element(at("talk"), "div", "message user");
  for (const url of pictures) element(box, "img", "").src = url;
  box.append(text);
  pictures = [];
  at("pictures").replaceChildren();
  if (await reply()) return;
  if (talk.at(-1) === said) talk.pop(); // else the server would refuse whatever comes after it as well
  if (!at("text").value) at("text").value = text;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value;
  if (running || (!text.trim() && !pictures.length)) return;
  at("text").value = "";
  say(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
});
at("stop").addEventListener("click", () => running?.abort());
at("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("talk").replaceChildren();
});
at("file").addEventListener("change", () => {
  for (const file of at("file").files) {
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      pictures.push(reader.result);
      element(at("pictures"), "img", "").src = reader.result;
    });
    reader.readAsDataURL(file);
  }
  at("file").value = "";
});

// --- the figures ---

const speeds = [];
let before = null;

function list(id, rows) {
  at(id).replaceChildren();
  for (const [name, value, colour] of rows) {
    const term = element(at(id), "dt", "");
    if (colour) element(term, "i", colour);
    term.append(name);
    element(at(id), "dd", "", typeof value === "number" ? value.toLocaleString("en") : value);
  }
}

function show(now) {
  const written = before && now.generated_tokens - before.stats.generated_tokens;
  const speed = before ? (written * 1000) / (now.time - before.time) : 0;
  before = { stats: now, time: now.time };
  speeds.push(speed);
  if (speeds.length > SECONDS) speeds.shift();
  const most = Math.max(...speeds, 1);
  const points = speeds.map((value, i) => `${i + SECONDS - speeds.length},${29 - (28 * value) / most}`);
  at("speed").firstElementChild.setAttribute("points", points.join(" "));
  const share = now.drafted ? `${Math.round((100 * now.accepted) / now.drafted)} %` : "none";
  list("figures", [
    ["tokens a second", speed.toFixed(1)],
    ["running", now.running],
    ["waiting", now.waiting],
    ["tokens of the last step", now.batch_tokens],
    ["tokens written", now.generated_tokens],
    ["guesses that came true", share],
    ["checkpoints", now.checkpoints],
  ]);
  const missed = MISSES.map((reason) => [reason, now.misses[reason] ?? 0]);
  at("cache").replaceChildren();
  for (const [kind, count] of [["hit", now.cache_hits], ...missed]) element(at("cache"), "div", kind).style.flexGrow = count;
  list("misses", [["cached", now.cache_hits, "hit"], ...missed.map(([reason, n]) => [reason.replace("_", " "), n, reason])]);
  showPool(now);
  at("about").replaceChildren();
  for (const line of now.about) element(at("about"), "li", "", line);
}

function showPool(now) {
  const cells = Math.min(CELLS, now.pages_total);
  const of = (pages) => Math.ceil((pages * cells) / Math.max(1, now.pages_total));
  const used = of(now.pages_used);
  const cached = of(now.pages_cached);
  at("pool").replaceChildren();
  for (let i = 0; i < cells; i++) element(at("pool"), "i", i < used ? "used" : i < used + cached ? "hit" : "free");
  const free = now.pages_total - now.pages_used - now.pages_cached;
  list("pages", [["used", now.pages_used, "used"], ["cached", now.pages_cached, "hit"], ["free", free, "free"]]);
}

async function watch() {
  try {
    const response = await fetch("/figures", { headers: headers() });
    if (response.ok) show({ ...(await response.json()), time: performance.now() });
    if (response.ok && !at("model").options.length) await models();
  } catch {
    list("figures", [["the server does not answer", ""]]);
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

async function models() {
  const response = await fetch("/v1/models", { headers: headers() });
  for (const { id } of (await response.json()).data) at("model").append(new Option(id));
}

watch();
