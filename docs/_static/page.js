// Every page: pictures open by themselves, and the list of pages shows where one is.
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

  // The list is longer than most windows: the page that is shown may be below its end.
  const list = document.querySelector(".sidebar-scroll");
  const current = list?.querySelector(".current-page");
  if (!current) return;
  const below = current.getBoundingClientRect().bottom - list.getBoundingClientRect().bottom;
  if (below > 0) list.scrollTop += below + list.clientHeight / 3;
});
