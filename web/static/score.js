/* global ABCJS */
// A score: drawn by abcjs, and played by oscillators of our own, since abcjs would fetch its sounds
// from elsewhere. The notes light up as they sound, by the clock of the sound itself.

/** Seconds of sound that are planned ahead, and how often. */
const AHEAD_S = 1;
const PLAN_MS = 250;
const VOLUME = 0.2;

let score = null;
let player = null;

/**
 * The site's policy forbids style attributes and style elements; what a script sets one by one it
 * allows. So the styles that abcjs writes as attributes are taken apart, and its style element,
 * which is for dragging notes alone, becomes one that says nothing.
 */
function withoutInlineStyles(draw) {
  const { setAttribute } = Element.prototype;
  const { createElementNS } = document;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };
  document.createElementNS = function (space, name) {
    return createElementNS.call(this, space, name === "style" ? "metadata" : name);
  };
  try {
    return draw();
  } finally {
    Element.prototype.setAttribute = setAttribute;
    delete document.createElementNS;
  }
}

/** The notes of a tune in order: when, the pitches and how long each sounds, what is drawn of it. */
function notesOf(tune) {
  tune.setUpAudio(); // this is what gives the notes their pitches
  const { num, den } = tune.getMeterFraction();
  const events = (tune.setTiming(tune.getBpm(), 0) ?? []).filter((it) => it.type === "event");
  return events.map((it) => {
    const wholeNoteS = it.millisecondsPerMeasure / 1000 / (num / den);
    return {
      at_s: it.milliseconds / 1000,
      pitches: (it.midiPitches ?? []).map(({ pitch, duration }) => ({
        hz: 440 * 2 ** ((pitch - 69) / 12),
        for_s: duration * wholeNoteS,
      })),
      elements: (it.elements ?? []).flat(),
    };
  });
}

function draw() {
  const source = document.querySelector("[data-abc]");
  const paper = document.querySelector("[data-paper]");
  if (!source || !paper || score?.paper === paper) return;
  paper.parentElement.hidden = false;
  // It would show the backslash that the notation has before an ampersand of a title.
  const notation = source.textContent.replaceAll("\\&", "&");
  const widthPx = Math.min(740, Math.max(320, paper.clientWidth - 40));
  const [tune] = withoutInlineStyles(() =>
    ABCJS.renderAbc(paper, notation, {
      responsive: "resize",
      add_classes: true,
      staffwidth: widthPx,
      wrap: { minSpacing: 1.8, maxSpacing: 2.7, preferredMeasuresPerLine: widthPx < 500 ? 2 : 4 },
      format: { titlefont: "system-ui 18 bold" },
    })
  );
  paper.querySelector("metadata")?.remove();
  score = { paper, notes: notesOf(tune) };
  const controls = document.querySelector("[data-player]");
  controls.hidden = score.notes.length === 0;
  controls.querySelector("[data-play]").addEventListener("click", () => player ? stop() : play());
}

const said = (text) => document.querySelector("[data-time]").textContent = text;
const clock = (s) => `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")}`;

function play() {
  const context = new AudioContext();
  const { notes } = score;
  const endS = Math.max(
    ...notes.flatMap((it) => it.pitches.map(({ for_s }) => it.at_s + for_s)),
    0,
  );
  player = { context, start_s: context.currentTime + 0.15, next: 0, shown: 0, lit: [], endS };
  player.timer = setInterval(plan, PLAN_MS);
  document.querySelector("[data-play]").textContent = "Stop";
  plan();
  requestAnimationFrame(follow);
}

/** Plans the notes of the next second: a long tune has thousands. */
function plan() {
  const { context, start_s } = player;
  const untilS = context.currentTime - start_s + AHEAD_S;
  for (; player.next < score.notes.length; player.next++) {
    const { at_s, pitches } = score.notes[player.next];
    if (at_s > untilS) return;
    for (const pitch of pitches) sound(context, start_s + at_s, pitch);
  }
}

/** A soft note: a triangle, and a sine an octave above, that fade. */
function sound(context, at, { hz, for_s }) {
  const end = at + Math.max(0.08, for_s * 0.95);
  const gain = context.createGain();
  gain.gain.setValueAtTime(0, at);
  gain.gain.linearRampToValueAtTime(VOLUME, at + 0.015);
  gain.gain.exponentialRampToValueAtTime(VOLUME * 0.35, end);
  gain.gain.linearRampToValueAtTime(0, end + 0.06);
  gain.connect(context.destination);
  for (const [type, times, share] of [["triangle", 1, 1], ["sine", 2, 0.25]]) {
    const oscillator = context.createOscillator();
    const level = context.createGain();
    level.gain.value = share;
    oscillator.type = type;
    oscillator.frequency.value = hz * times;
    oscillator.connect(level).connect(gain);
    oscillator.start(at);
    oscillator.stop(end + 0.1);
  }
}

function follow() {
  if (!player) return;
  const nowS = player.context.currentTime - player.start_s;
  const { notes } = score;
  while (player.shown < notes.length && notes[player.shown].at_s <= nowS) {
    for (const it of player.lit) it.classList.remove("playing");
    player.lit = notes[player.shown++].elements;
    for (const it of player.lit) it.classList.add("playing");
    keepInView(player.lit[0]);
  }
  said(`${clock(Math.max(0, nowS))} of ${clock(player.endS)}`);
  if (nowS > player.endS + 0.2) stop();
  else requestAnimationFrame(follow);
}

/** Scrolls a long score along, unless the reader would rather not see things move. */
function keepInView(element) {
  if (!element || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const { top, bottom } = element.getBoundingClientRect();
  if (top < 90 || bottom > innerHeight - 40) {
    element.scrollIntoView({ block: "center", behavior: "smooth" });
  }
}

function stop() {
  clearInterval(player.timer);
  for (const it of player.lit) it.classList.remove("playing");
  player.context.close();
  player = null;
  document.querySelector("[data-play]").textContent = "Play";
}

draw();
document.addEventListener("refreshed", draw);
