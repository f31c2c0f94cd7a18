/* Forms that take documents: files are read into their fields, and what is wrong with a form is focused. */

for (const input of document.querySelectorAll("input[type=file][data-into]")) {
  input.addEventListener("change", async () => {
    if (input.files[0]) document.getElementById(input.dataset.into).value = await input.files[0].text();
  });
}

const faults = document.getElementById("faults");
if (faults) faults.focus();
