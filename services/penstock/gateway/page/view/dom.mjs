// Elements by name, attributes and children. Text is only ever a text node.

const PROPERTIES = new Set(["value", "checked", "min", "max", "low", "high", "optimum", "open", "disabled", "hidden", "indeterminate"]);

/** Makes an element: `on…` attributes are listeners, false and null are left out, children are nodes or text. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (PROPERTIES.has(key)) element[key] = value;
    else if (value === undefined || value === null || value === false) continue;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button with an icon and a name that is read aloud; `label` true shows the name, too. */
export function button(icon, name, onclick, { label = false, ...attributes } = {}) {
  const named = label ? {} : { "aria-label": name, title: name };
  return el("button", { type: "button", ...named, ...attributes, onclick }, icon, label && el("span", {}, name));
}

/** Replaces an element's children by others. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
}

let made = 0;

/** An id that no other element has. */
export function freshId(prefix) {
  made += 1;
  return `${prefix}-${made}`;
}
