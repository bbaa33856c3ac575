// A citation opens its passage; the conversation stays at its end while an answer grows.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.cite");
  if (!link) return;
  event.preventDefault();
  const passage = document.getElementById(link.getAttribute("href").slice(1));
  if (!passage) return;
  passage.open = true;
  passage.scrollIntoView({ behavior: "smooth", block: "nearest" });
  passage.classList.remove("lit");
  void passage.offsetWidth;
  passage.classList.add("lit");
});
let turns = 0;
new MutationObserver(() => {
  const found = document.querySelectorAll(".talk .turn");
  const last = found[found.length - 1];
  if (!last) { turns = 0; return; }
  const grows = last.querySelector(".writing, .waiting") || found.length !== turns;
  turns = found.length;
  if (grows) last.scrollIntoView({ block: "nearest" });
}).observe(document.documentElement, { childList: true, subtree: true, characterData: true });

// Whether the server is still there: an answer that has stopped half way is told, and nothing shown is lost.
const ALIVE_EVERY = 2000;
const gone = document.createElement("div");
gone.id = "gone";
gone.hidden = true;
gone.setAttribute("role", "alert");
gone.textContent = "The server no longer answers. What is here stays; reload the page when it is back.";
setInterval(async () => {
  if (document.hidden) return;
  if (!gone.isConnected) document.body.append(gone);
  try {
    await fetch("/alive", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    gone.hidden = true;
  } catch {
    gone.hidden = false;
  }
}, ALIVE_EVERY);
