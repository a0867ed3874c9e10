// What the model's folder states: its schemes and size, and how far the model is from its float model.

import { made } from "./markdown.js";

const WHAT_IS_KL = "KL is the mean divergence of the predicted next tokens from the float model's, in nats: 0 is none.";

const count = (value) => {
  const [size, unit] = [[1e9, "B"], [1e6, "M"], [1e3, "K"]].find(([size]) => value >= size) ?? [1, ""];
  return `${(value / size).toPrecision(3)}${unit}`;
};
const bytes = (value) =>
  value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)} MB`;
const percent = (value) => `${(100 * value).toFixed(1)} %`;

// A figure and its standard error, with no more digits than the error justifies.
export function figure(value, error) {
  if (value === null) return "not a number";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1);
  if (!error) return value ? String(Number(value.toPrecision(3))) : "0";
  const exponent = Math.floor(Math.log10(error));
  const decimals = Math.max(0, (error / 10 ** exponent < 2.95 ? 1 : 0) - exponent);
  return `${value.toFixed(decimals)} ± ${error.toFixed(decimals)}`;
}

const short = (certificate) => figure(certificate.kl, certificate.kl_error).split(" ")[0];

function verdict({ passed, kl_bound: bound }) {
  return passed ? `passed: at most ${figure(bound)}` : "beyond its bound, and accepted";
}

// The model in one line.
export function factsLine(model) {
  const about = model.quantkit ?? {};
  const parts = [about.scheme ?? (about.tensors && "not quantized"), about.weight_bytes && bytes(about.weight_bytes)];
  if (about.certificate) parts.push(`KL ${short(about.certificate)}`);
  return [...parts, `${model.max_model_len} tokens`].filter(Boolean).join(" · ");
}

// Name, figure and remark of each fact.
export function tiles(model) {
  const about = model.quantkit ?? {};
  const { certificate } = about;
  const found = [];
  if (about.tensors) {
    const bits = `${about.bits_per_weight.toFixed(2)} bits per weight`;
    found.push(["Scheme", about.scheme ?? Object.keys(about.tensors)[0], bits]);
    found.push(["Size", bytes(about.weight_bytes), `${count(about.parameters)} parameters`]);
  }
  if (certificate) found.push(["KL from float model", short(certificate), verdict(certificate)]);
  else if (about.scheme) found.push(["KL from float model", "unknown", "no certificate"]);
  const whole = about.context > model.max_model_len ? `tokens, of the model's ${about.context}` : "tokens";
  return [...found, ["Context", String(model.max_model_len), whole]];
}

// Everything, for the dialog.
export function certificateBody(model) {
  const about = model.quantkit ?? {};
  if (!about.tensors) return [made("p", "", `The folder cannot be inspected: ${about.problem ?? "unknown"}.`)];
  const { certificate } = about;
  const found = [];
  if (certificate) {
    const verdict = certificate.passed
      ? "When it was made, the model passed the comparison with its float model."
      : `Beyond its bound, and accepted: ${certificate.problem}.`;
    found.push(made("p", certificate.passed ? "" : "problem", verdict), textTable(certificate));
    found.push(made("p", "note", `${WHAT_IS_KL} ± is one standard error.`));
    if (certificate.positions) found.push(...positionTable(certificate.positions));
  } else if (about.scheme) {
    const missing = "This folder has no certificate: it does not state how far the model is from its float model.";
    found.push(made("p", "", missing));
  } else {
    found.push(made("p", "", "The weights are floats. There is no quantization to certify."));
  }
  const facts = made("dl", "facts");
  for (const [name, value] of factRows(about)) facts.append(made("dt", "", name), made("dd", "", value));
  found.push(facts, made("p", "note", made("code", "", "quantkit inspect FOLDER"), " shows all that it states."));
  return found;
}

function factRows(about) {
  const maker = about.made_by;
  const how = maker && [maker.job, maker.method, maker.effort && `effort ${maker.effort}`].filter(Boolean).join(", ");
  return [
    ["Tensors", Object.entries(about.tensors).map(([kind, number]) => `${number} × ${kind}`).join(", ")],
    ["Parameters", `${count(about.parameters)}, ${about.architecture}`],
    ["Size", `${bytes(about.weight_bytes)}, ${about.bits_per_weight.toFixed(2)} bits per weight`],
    ["Context", `${about.context} tokens`],
    ["Loads in", about.readers.join(", ")],
    ...(maker ? [["Made by", `quantkit ${maker.quantkit_version} (${how})`]] : []),
  ];
}

function textTable({ texts }) {
  const ratio = ({ perplexity_ratio: value }) => (value === null ? "" : `× ${value.toFixed(3)}`);
  const rows = [
    ["KL", ...texts.map((one) => figure(one.kl, one.kl_error))],
    ["At most", ...texts.map((one) => figure(one.kl_bound))],
    ["Perplexity", ...texts.map(ratio)],
    ["Same top token", ...texts.map((one) => percent(one.top1_agreement))],
    ["Tokens", ...texts.map((one) => one.tokens)],
  ];
  return table("KL by text", ["Text", ...texts.map((one) => one.text)], rows);
}

function positionTable({ text, length, windows, kl_bound: bound, caches }) {
  const names = ["Positions", ...Object.keys(caches).map((cache) => `KL, ${cache} cache`)];
  const rows = Object.values(caches)[0].map(({ start, stop }, at) => [
    `${start}-${stop - 1}`, ...Object.values(caches).map((buckets) => figure(buckets[at].kl, buckets[at].kl_error)),
  ]);
  const measured = `By position in the context, on ${windows} × ${length} tokens of ${text}`;
  const note = made("p", "note", `${measured}; at most ${figure(bound)} with the float cache.`);
  return [made("h3", "", "Long contexts"), table("KL by position", names, rows), note];
}

function table(caption, names, rows) {
  const head = made("tr", "", ...names.map((name) => Object.assign(made("th", "", name), { scope: "col" })));
  const lines = rows.map(([first, ...rest]) => {
    const own = Object.assign(made("th", "", first), { scope: "row" });
    return made("tr", "", own, ...rest.map((value) => made("td", "", String(value))));
  });
  const title = made("caption", "hidden", caption);
  const scroll = made("div", "scroll", made("table", "", title, made("thead", "", head), made("tbody", "", ...lines)));
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "group");
  scroll.setAttribute("aria-label", caption);
  return scroll;
}
