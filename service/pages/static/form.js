/* The form that asks for a plan: schedules and options of the chosen planner only. */

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
