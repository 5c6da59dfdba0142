// Every page: pictures open by themselves, tables and commands can be read on a narrow screen, and the list of pages
// shows where one is.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  // Beside a page's text the words of a picture are too small to read on a phone.
  for (const picture of document.querySelectorAll("article img")) {
    if (picture.closest("a")) continue;
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }

  // A cell below its neighbour is without its column's head.
  for (const table of document.querySelectorAll("table.cards")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.tBodies[0].rows) {
      for (const cell of [...row.cells].slice(1)) {
        if (cell.textContent.trim()) cell.dataset.label = heads[cell.cellIndex];
      }
    }
  }

  // A name too long for its column breaks between its parts, if it can.
  for (const code of document.querySelectorAll("table.prose code span, table.prose code:not(:has(span))")) {
    const parts = code.textContent.split(/(?<=[._(=,/])(?=\w)|(?<=[a-z])(?=[A-Z])/);
    code.replaceChildren(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  }

  // A browser breaks a line behind any hyphen, so within an option or a number: what has no space stays together.
  for (const pre of document.querySelectorAll(".wrap pre")) {
    let word = null;
    for (const node of [...pre.childNodes]) {
      const isText = node.nodeType === Node.TEXT_NODE;
      for (const part of isText ? node.data.split(/(\s+)/).filter(Boolean) : [node]) {
        if (node.className === "c1" || !(isText ? part : part.textContent).trim()) {
          word = null; // a comment, or space
          node.before(part);
        } else {
          if (!word) {
            word = document.createElement("span");
            word.className = "word";
            node.before(word);
          }
          word.append(part);
        }
      }
      if (isText) node.remove();
    }
  }

  // The list is longer than most windows: the page that is shown may be below its end.
  const list = document.querySelector(".sidebar-scroll");
  const current = list?.querySelector(".current-page");
  if (!current) return;
  const below = current.getBoundingClientRect().bottom - list.getBoundingClientRect().bottom;
  if (below > 0) list.scrollTop += below + list.clientHeight / 3;
});
