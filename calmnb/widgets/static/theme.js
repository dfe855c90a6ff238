// Light and dark: which of the two the page is, and when that changes.

/** Whether the page is dark: by what the notebook says of its theme, else by the colour behind the widget. */
export function isDark(node) {
  const said = document.body.dataset;
  if (said.jpThemeLight) return said.jpThemeLight === "false";
  if (said.vscodeThemeKind) return !said.vscodeThemeKind.includes("light");
  if (document.documentElement.getAttribute("theme")) return document.documentElement.getAttribute("theme") === "dark";
  for (let at = node.parentElement; at; at = at.parentElement) {
    const [r, g, b, alpha = 1] = (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) || []).map(Number);
    if (r !== undefined && alpha > 0.5) return 0.299 * r + 0.587 * g + 0.114 * b < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Keep `root.dataset.theme` right and call `redraw` when it changes. Returns a function that ends that. */
export function watchTheme(root, redraw) {
  const set = () => {
    const theme = isDark(root) ? "dark" : "light";
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    redraw();
  };
  const observer = new MutationObserver(set);
  const names = ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "class", "theme", "data-theme"];
  for (const node of [document.documentElement, document.body]) observer.observe(node, { attributes: true, attributeFilter: names });
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", set);
  set();
  return () => {
    observer.disconnect();
    media.removeEventListener("change", set);
  };
}

/** The static view in the notebook is for places where the live one does not run. */
export function hideStatic(id) {
  if (!id) return;
  for (const node of document.querySelectorAll(".calmnb-static")) if (node.classList.contains(id)) node.style.display = "none";
}
