// Keeps a page as it is at the server: parts of it marked data-live are fetched anew, and a job's
// page follows the job's events. What has focus keeps it, and so does what scrolled or was opened.

const regions = [...document.querySelectorAll("[data-live]")];
const everyMs = Math.min(
  ...regions.map((it) => Number(it.dataset.live) * 1000).filter((ms) => ms > 0),
);
let paused = false;
let fetching = false;

/** Makes `old` like `fresh`, and leaves alone what is alike, and what another script made. */
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.hasAttribute("data-keep") || old.matches("input, select, textarea")) return;
  for (const { name, value } of fresh.attributes) {
    // Whether a part is open is the reader's to say.
    if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  const now = [...old.childNodes];
  const next = [...fresh.childNodes];
  next.forEach((node, i) => i < now.length ? morph(now[i], node) : old.append(node));
  now.slice(next.length).forEach((node) => node.remove());
}

async function refresh() {
  if (fetching) return;
  fetching = true;
  try {
    const reply = await fetch(location.href, { headers: { accept: "text/html" } });
    // Signed out meanwhile, or not there any more: the page stays as it was.
    if (!reply.ok || reply.redirected) return;
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const region of regions) {
      const fresh = page.getElementById(region.id);
      if (fresh) morph(region, fresh);
    }
    document.dispatchEvent(new Event("refreshed"));
  } catch {
    // The site is away for the moment; the next time may do.
  } finally {
    fetching = false;
  }
}

if (Number.isFinite(everyMs)) {
  setInterval(() => {
    if (!paused && !document.hidden) refresh();
  }, everyMs);
}

for (const button of document.querySelectorAll("[data-pause]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Go on updating" : "Pause updates";
    document.dispatchEvent(new CustomEvent("paused", { detail: paused }));
  });
}

const followed = document.querySelector("[data-job]");
if (followed) {
  const events = new EventSource(`/api/jobs/${followed.dataset.job}/events`);
  let last = "";
  events.addEventListener("job", async ({ data }) => {
    const { status, attempt, stage, progress } = JSON.parse(data);
    const where = `${status} ${attempt}`;
    if (where !== last) await refresh();
    last = where;
    const said = document.querySelector("[data-stage]");
    if (said && stage !== null) said.textContent = stage;
    const bar = document.querySelector("[data-progress]");
    if (bar && progress !== null) bar.value = progress;
  });
  events.addEventListener("end", async () => {
    events.close();
    await refresh();
    delete followed.dataset.job;
  });
}

// A file may take a while to send: once is enough.
for (const form of document.querySelectorAll("form[enctype='multipart/form-data']")) {
  form.addEventListener("submit", () => {
    const button = form.querySelector("button:not([type])");
    button.disabled = true;
    button.textContent = "Sending…";
  });
  addEventListener("pageshow", () => {
    for (const button of form.querySelectorAll("button:disabled")) {
      button.disabled = false;
      button.textContent = "Submit";
    }
  });
}
