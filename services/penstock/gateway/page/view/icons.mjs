// Icons as paths of a 24 by 24 grid, drawn with a stroke of the text's colour.

const SPACE = "http://www.w3.org/2000/svg";
const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h10",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V6M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  done: "M5 12.5l4.5 4.5L19 7.5",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  remove: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  close: "M6 6l12 12M18 6L6 18",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  compare: "M4 5h7v14H4zM13 5h7v14h-7z",
  down: "M12 5v14M6 13l6 6 6-6",
  upload: "M12 16V5M7 9l5-5 5 5M5 19h14",
  download: "M12 4v11M7 11l5 5 5-5M5 19h14",
  tool: "M14 6a4 4 0 0 0 5 5l-9 9-4-4 9-9",
};

/** Makes an icon, which is hidden from readers of the screen: its button has the name. */
export function icon(name) {
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  const path = document.createElementNS(SPACE, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
