// Troubleshooting: shows the rows whose words are, in their order, in the pasted text. If there are none, shows the rows
// that contain the text. Types of errors, the page's last table, come after all other rows.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("paste");
  if (!box) return;
  const input = document.createElement("textarea");
  const output = document.createElement("div");
  const label = document.createElement("label");
  label.append("Paste the error, with its traceback if there is one. The text stays in your browser.", input);
  Object.assign(input, { rows: 6, spellcheck: false });
  output.setAttribute("aria-live", "polite");
  box.append(label, output);

  // One line in small letters, without a terminal's colours and the prefixes that torchrun and srun write.
  const normal = (text) =>
    text
      .replace(/\x1b\[[\d;]*m/g, "")
      .replace(/^(\[(rank|default)\d+\]:|\s*\d+: )/gm, "")
      .replace(/\s+/g, " ")
      .toLowerCase();

  const rows = [];
  for (const row of document.querySelectorAll("table tbody tr")) {
    const [message, meaning, action] = row.cells;
    const isType = row.closest("#types-of-errors") !== null;
    for (const code of message.querySelectorAll("code")) {
      const words = normal(code.textContent);
      const parts = words.split("...").map((part) => part.trim()).filter(Boolean);
      rows.push({ words, parts, size: isType ? 0 : parts.join("").length, code, meaning, action });
    }
  }

  // Whether all parts are found, one after the other.
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
    if (!found.length) output.append("No row has these words. Paste the end of the text, with the name of the error. If that is there: the message itself says what was given, what was expected and what to do.");
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
