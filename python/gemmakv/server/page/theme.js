// Before anything is drawn: the theme that was chosen here, if any.
try {
  const chosen = localStorage.getItem("gemmakv.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // It is blocked: storage.js says so.
}
