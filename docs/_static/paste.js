// Troubleshooting: shows the rows of the page's tables whose words, in their order, are in what is pasted.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("paste");
  if (!box) return;
  const input = document.createElement("textarea");
  const output = document.createElement("div");
  const label = document.createElement("label");
  label.append("Paste what you saw, with its traceback if there is one. It stays in your browser.", input);
  Object.assign(input, { rows: 6, spellcheck: false });
  output.setAttribute("aria-live", "polite");
  box.append(label, output);

  // As one line, without what torchrun writes before the lines of a rank.
  const normal = (text) => text.replace(/^\[(rank|default)\d+\]:/gm, "").replace(/\s+/g, " ");

  const rows = [];
  for (const row of document.querySelectorAll("table tbody tr")) {
    const [message, meaning, action] = row.cells;
    for (const code of message.querySelectorAll("code")) {
      const parts = normal(code.textContent).split("...").map((part) => part.trim()).filter(Boolean);
      rows.push({ parts, size: parts.join("").length, code, meaning, action });
    }
  }

  // Where one part after the other is found, from the left.
  const holds = (text, parts) => {
    let from = 0;
    return parts.every((part) => {
      const at = text.indexOf(part, from);
      from = at + part.length;
      return at >= 0;
    });
  };

  const show = () => {
    const text = normal(input.value);
    const seen = new Set();
    const found = rows
      .filter((row) => holds(text, row.parts))
      .sort((one, other) => other.size - one.size) // the most words first
      .filter((row) => !seen.has(row.meaning) && seen.add(row.meaning))
      .slice(0, 5);
    output.replaceChildren();
    if (!text.trim()) return;
    if (!found.length) output.append("No row has these words. The end of the text, with the error's name, is what counts.");
    for (const { code, meaning, action } of found) {
      const item = document.createElement("section");
      const title = document.createElement("p");
      title.append(code.cloneNode(true));
      item.append(title);
      for (const cell of [meaning, action]) {
        const part = document.createElement("p");
        part.append(...[...cell.childNodes].map((node) => node.cloneNode(true)));
        item.append(part);
      }
      output.append(item);
    }
  };

  input.addEventListener("input", show);
});
