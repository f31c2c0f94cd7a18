/* A plan's page: buttons that copy, and parts that a link opens. */

const said = document.querySelector("[data-copied]");

for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    said.textContent = `The ${button.dataset.copy === "python" ? "Python call" : "command"} was copied.`;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

/** Open the part that the address names, and bring it into sight; a timeline's view in the address is none. */
function open() {
  const part = /^#[a-z]+$/.test(window.location.hash) && document.querySelector(`details.part${window.location.hash}`);
  if (!part) return;
  part.open = true;
  part.scrollIntoView();
  part.querySelector("summary").focus({ preventScroll: true });
}

window.addEventListener("hashchange", open);
for (const link of document.querySelectorAll('a[href^="#"]')) link.addEventListener("click", () => setTimeout(open));
open();
