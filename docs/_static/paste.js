// Troubleshooting: shows the rows of the page's tables whose words, in their order, are in what is pasted; where there
// are none, those that have what is typed.
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

  // As one line in small letters, without a terminal's colours and what torchrun or srun writes before a rank's lines.
  const normal = (text) =>
    text
      .replace(/\x1b\[[\d;]*m/g, "")
      .replace(/^(\[(rank|default)\d+\]:|\s*\d+: )/gm, "")
      .replace(/\s+/g, " ")
      .toLowerCase();

  const rows = [];
  for (const row of document.querySelectorAll("table tbody tr")) {
    const [message, meaning, action] = row.cells;
    for (const code of message.querySelectorAll("code")) {
      const words = normal(code.textContent);
      const parts = words.split("...").map((part) => part.trim()).filter(Boolean);
      rows.push({ words, parts, size: parts.join("").length, code, meaning, action });
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
    const text = normal(input.value).trim();
    const seen = new Set();
    const pasted = rows.filter((row) => holds(text, row.parts));
    const typed = (row) => text.length >= 4 && row.words.includes(text);
    const found = (pasted.length ? pasted : rows.filter(typed))
      .sort((one, other) => other.size - one.size) // the most words first
      .filter((row) => !seen.has(row.meaning) && seen.add(row.meaning))
      .slice(0, 5);
    output.replaceChildren();
    if (!text) return;
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
