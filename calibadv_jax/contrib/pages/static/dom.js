// Elements from values. Text from documents and the policy is only ever a text node, never markup.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("data-") || name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child); // a string becomes a text node
  }
  return element;
}

export const find = (id) => document.getElementById(id);

export function signed(value, places = 3) {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value).toFixed(places);
  if (Number(text) === 0) return text;
  return (value < 0 ? "−" : "+") + text;
}

export function plain(value, places = 3) {
  return value === null || value === undefined ? "–" : String(Number(value.toFixed(places))).replace("-", "−");
}
