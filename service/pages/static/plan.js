/* A plan's page: buttons that copy. */

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
