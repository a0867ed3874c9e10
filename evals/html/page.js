"use strict";
(() => {
  const source = document.getElementById("data");
  document.documentElement.classList.add("js");

  const made = (name, kind, text) => {
    const one = document.createElement(name);
    if (kind) one.className = kind;
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const percent = (thousandths) => (thousandths ? (thousandths / 10).toFixed(1) + " %" : "< 0.1 %");

  // Show a cell's title when it is tapped, for devices without a pointer.
  for (const map of document.querySelectorAll(".heat-map")) {
    const readout = map.querySelector(".readout");
    for (const kind of ["pointerover", "click"]) {
      map.addEventListener(kind, (event) => {
        const field = event.target.closest("td[title]");
        if (field) readout.textContent = field.title;
      });
    }
  }
  if (!source) return;
  const data = JSON.parse(source.textContent);

  const line = (token, share, right) => {
    const one = made("li", right ? "right" : "");
    one.style.setProperty("--share", share / 10 + "%");
    one.append(made("bdi", "", data.pieces[token]), made("span", "", percent(share)));
    return one;
  };
  const guess = (name, flat, right) => {
    const part = made("div"), list = made("ol");
    part.append(made("h5", "", name), list);
    let listed = false;
    for (let at = 0; at + 1 < flat.length; at += 2) {
      listed = listed || flat[at] === right;
      list.append(line(flat[at], flat[at + 1], flat[at] === right));
    }
    if (!listed) {
      const more = line(right, flat[flat.length - 1], true);
      more.classList.add("more");
      list.append(more);
    }
    return part;
  };

  for (const text of document.querySelectorAll(".tokens")) {
    const samples = data.texts[text.dataset.text], panel = text.querySelector(".guess").appendChild(made("div"));
    let current = null;

    const show = (token) => {
      const stretch = token.parentNode, place = stretch.tokens.indexOf(token);
      const model = token.closest(".panel").dataset.model, sample = samples[stretch.dataset.stretch];
      const found = sample.models[model][place], right = sample.tokens[place], head = made("p", "head");
      if (current) {
        current.classList.remove("current");
        current.tabIndex = -1;
      }
      current = token;
      token.classList.add("current");
      token.tabIndex = 0;
      head.append(made("bdi", "", data.pieces[right]), made("span", "kl", found.length ? "KL " + found[0] : ""));
      panel.replaceChildren(head);
      if (!found.length) {
        panel.append(made("p", "", "Nothing comes before it: it is not predicted."));
        return;
      }
      const columns = made("div", "columns");
      columns.append(guess(data.reference, sample.reference[place], right));
      columns.append(guess(data.models[model], found.slice(1), right));
      panel.append(columns);
    };
    const worst = (own) => {
      let found = null, largest = -1;
      for (const stretch of own.querySelectorAll(".stretch")) {
        samples[stretch.dataset.stretch].models[own.dataset.model].forEach((one, place) => {
          if (one.length && Number(one[0]) > largest) {
            largest = Number(one[0]);
            found = stretch.tokens[place];
          }
        });
      }
      return found;
    };

    for (const stretch of text.querySelectorAll(".stretch")) {
      stretch.tokens = [...stretch.children];
      stretch.tokens[0].tabIndex = 0;
      stretch.addEventListener("pointerover", (event) => {
        const token = event.target.closest(".stretch > i");
        if (token) show(token);
      });
      stretch.addEventListener("click", (event) => {
        const token = event.target.closest(".stretch > i");
        if (token) show(token);
      });
      stretch.addEventListener("focusin", (event) => show(event.target));
      stretch.addEventListener("keydown", (event) => {
        const at = stretch.tokens.indexOf(event.target), last = stretch.tokens.length - 1;
        const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
        if (at < 0 || next === undefined || next < 0 || next > last) return;
        event.preventDefault();
        stretch.tokens[next].tabIndex = 0;
        stretch.tokens[next].focus();
      });
    }
    const first = () => {
      const own = [...text.querySelectorAll(".panel")].find((one) => getComputedStyle(one).display !== "none");
      const token = own && worst(own);
      if (token) show(token);
    };
    text.addEventListener("change", first);
    first();
  }
})();
