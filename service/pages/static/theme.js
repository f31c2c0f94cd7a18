/* Light, dark, or as the system has it: set before the page is drawn, kept in the browser. Classic, in the head. */
(() => {
  "use strict";
  const KEY = "penstock-theme", root = document.documentElement;
  const kept = () => { try { return window.localStorage.getItem(KEY) || ""; } catch { return ""; } };
  const keep = (choice) => { try { window.localStorage.setItem(KEY, choice); } catch { /* pages without storage start from the default */ } };
  const choose = (choice) => {
    if (choice) root.setAttribute("data-theme", choice); else root.removeAttribute("data-theme");
    for (const button of document.querySelectorAll("[data-theme-choice]")) {
      button.setAttribute("aria-pressed", String(button.dataset.themeChoice === choice));
    }
    window.penstockTimeline?.restyle();
  };
  choose(kept());
  document.addEventListener("DOMContentLoaded", () => {
    choose(kept());
    for (const button of document.querySelectorAll("[data-theme-choice]")) {
      button.addEventListener("click", () => { keep(button.dataset.themeChoice); choose(button.dataset.themeChoice); });
    }
  });
})();
