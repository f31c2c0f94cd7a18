/* The form that asks for a plan: schedules and options of the chosen planner only, and fields that Back finds again. */

import "./files.js";

const planner = document.getElementById("planner"), schedule = document.getElementById("schedule");
const hint = document.getElementById("planner-hint");

function fit() {
  const chosen = planner.selectedOptions[0], own = chosen.dataset.schedules.split(" ");
  for (const option of schedule.options) {
    option.hidden = option.disabled = !own.includes(option.value);
  }
  if (schedule.selectedOptions[0]?.disabled) schedule.value = "auto";
  for (const details of document.querySelectorAll("[data-planner]")) details.hidden = details.dataset.planner !== planner.value;
  if (hint) hint.textContent = `${chosen.dataset.summary}.`;
}

planner.addEventListener("change", fit);
fit();

/* The address names what was sent, so that Back leads to a form that still has it; documents are too long for that. */
planner.form.addEventListener("submit", () => {
  const sent = [...new FormData(planner.form)].filter(([, value]) => value && value.length <= 200);
  history.replaceState(null, "", `/plan?${new URLSearchParams(sent)}`);
});
