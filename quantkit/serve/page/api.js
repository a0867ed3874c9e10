// The server's API, for this page: its model, and answers as they come.

const KEY = "quantkit.key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // a browser that stores nothing
}

class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

export function useKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // kept in memory
  }
}

// The model that is served. Addresses are relative: a proxy may serve all of this below a path.
export async function loadModel() {
  const response = await request("v1/models");
  return (await response.json()).data[0];
}

// The events of a streamed answer, as objects.
export async function* streamChat(body, signal) {
  const stream = { stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, ...stream }),
    signal,
  });
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function* serverSentEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let left = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const parts = (left + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      left = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection ended before the answer did.");
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  if (response.status === 429) {
    const seconds = response.headers.get("Retry-After");
    const when = seconds ? `in ${seconds} ${seconds === "1" ? "second" : "seconds"}` : "in a moment";
    return new ApiError(`The server is busy. Try again ${when}.`, 429);
  }
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: a proxy's answer, perhaps
  }
  return new ApiError(message || `The server answered with status ${response.status}.`, response.status);
}
