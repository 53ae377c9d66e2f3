/**
 * From samples to notes, and from notes to MIDI and ABC. Pure: no files, no clock.
 *
 * A melody is followed, one note at a time, from G1 to E7. The pitch of each 10 ms is found by the
 * McLeod method; a note is a stretch of frames near one semitone, cut where its loudness jumps.
 */

import tonejs from "@tonejs/midi";
import { PitchDetector } from "pitchy";

/** The sample rate, in Hz, at which {@linkcode PitchTracker} listens. */
export const ANALYSIS_RATE_HZ = 44_100;

/** 46 ms: three periods of the lowest C of a cello. */
const WINDOW = 2_048;
/** Loudness is taken over the middle 23 ms, so that a short gap between two notes shows. */
const LOUDNESS_WINDOW = 1_024;
/** 10 ms. */
const HOP = 441;
const HOP_S = HOP / ANALYSIS_RATE_HZ;

/** G1, a quarter tone to spare: below, the beat of the overtones looks like notes struck again. */
const MIN_HZ = 47.6;
/** E7, likewise: above, the period is so few samples that the octave becomes uncertain. */
const MAX_HZ = 2_714;
const MIN_CLARITY = 0.85;
const SILENCE_DB = -60;
/** How far below the loudest frame a note may fade. */
const FADE_DB = 36;
/** A rise of this much within 40 ms is a note struck again. */
const STRIKE_DB = 3;
const STRIKE_FRAMES = 2;
/** 180 ms, one swing of a vibrato. */
const VIBRATO_FRAMES = 18;
/** 60 ms, the shortest note. */
const SHORTEST_FRAMES = 6;

/** One note of the transcription; times in seconds from the start of the recording. */
export interface Note {
  /** MIDI number: 60 is middle C. */
  midi: number;
  start_s: number;
  duration_s: number;
}

/** What was heard around one instant, every 10 ms from 0. */
export interface Frame {
  /** Pitch as a fractional MIDI number; NaN where there is none. */
  midi: number;
  /** Loudness in dB; 0 is a square wave at full scale. */
  db: number;
}

/** Follows the pitch of a mono signal at {@linkcode ANALYSIS_RATE_HZ}, block by block. */
export class PitchTracker {
  readonly frames: Frame[] = [];
  private readonly detector = PitchDetector.forFloat32Array(WINDOW);
  /** Begins half a window before the recording, so that the first frame is centred on 0. */
  private readonly window = new Float32Array(WINDOW);
  private filled = WINDOW / 2;
  private lastIn = 0;
  private lastOut = 0;
  private low = 0;

  /** Takes the next samples, of any number. */
  push(block: Float32Array): void {
    for (const sample of block) {
      // A microphone's constant offset would look like a perfect, endless period.
      this.lastOut = sample - this.lastIn + 0.997 * this.lastOut;
      this.lastIn = sample;
      // Softer overtones: the peaks of a bright high note fall between samples, an octave too low.
      this.low += 0.35 * (this.lastOut - this.low);
      this.window[this.filled++] = this.low;
      if (this.filled === WINDOW) {
        this.frames.push(this.listen());
        this.window.copyWithin(0, HOP);
        this.filled = WINDOW - HOP;
      }
    }
  }

  /** Hears the last half window out and gives all frames. */
  finish(): Frame[] {
    this.push(new Float32Array(WINDOW / 2).fill(this.lastIn));
    return this.frames;
  }

  private listen(): Frame {
    const db = loudness(this.window);
    if (db < SILENCE_DB) return { midi: NaN, db };
    const [hz, clarity] = this.detector.findPitch(this.window, ANALYSIS_RATE_HZ);
    const pitched = clarity >= MIN_CLARITY && hz >= MIN_HZ && hz <= MAX_HZ;
    return { midi: pitched ? 69 + 12 * Math.log2(hz / 440) : NaN, db };
  }
}

const HANN = Float32Array.from(
  { length: LOUDNESS_WINDOW },
  (_, i) => (1 - Math.cos(2 * Math.PI * (i + 0.5) / LOUDNESS_WINDOW)) / LOUDNESS_WINDOW,
);

/** Mean power in the middle of a window, in dB. */
function loudness(window: Float32Array): number {
  const from = (WINDOW - LOUDNESS_WINDOW) / 2;
  let power = 1e-12;
  for (let i = 0; i < LOUDNESS_WINDOW; i++) power += HANN[i] * window[from + i] ** 2;
  return 10 * Math.log10(power);
}

/** A stretch of frames with one pitch; `to` is the first frame after it. */
interface Run {
  midi: number;
  from: number;
  to: number;
}

/** The notes of a melody, in order, from what the {@linkcode PitchTracker} heard. */
export function findNotes(frames: Frame[]): Note[] {
  const pitch = steadyPitch(frames);
  const runs = joinOverBlips(findRuns(pitch), pitch);
  return runs.flatMap((run) => splitAtStrikes(run, frames))
    .map(({ midi, from, to }) => ({
      midi,
      start_s: roundMs(from * HOP_S),
      duration_s: roundMs((to - from) * HOP_S),
    }));
}

/** The pitch without single wrong frames, without faded tails, and with the tuning taken out. */
function steadyPitch(frames: Frame[]): number[] {
  const gate = frames.reduce((loudest, { db }) => Math.max(loudest, db), SILENCE_DB) - FADE_DB;
  const heard = frames.map(({ midi, db }) => db < gate ? NaN : midi);
  const smooth = heard.map((midi, i) => {
    if (Number.isNaN(midi)) return NaN;
    return median(heard.slice(Math.max(0, i - 2), i + 3).filter((near) => !Number.isNaN(near)));
  });
  const tuning = tuningOf(smooth);
  return smooth.map((midi) => midi - tuning);
}

/**
 * How far the recording is from 440 Hz tuning, in semitones: an instrument at 446 Hz is 24 cents
 * sharp throughout, and its vibrato would otherwise reach into the next semitone. It is the mean
 * around the circle of semitones, over spans as long as one swing of a vibrato.
 */
function tuningOf(pitch: number[]): number {
  let x = 0;
  let y = 0;
  for (let i = 0; i + VIBRATO_FRAMES <= pitch.length; i++) {
    const span = pitch.slice(i, i + VIBRATO_FRAMES);
    const steady = Math.max(...span) - Math.min(...span) < 1.5;
    if (!steady) continue;
    const angle = 2 * Math.PI * span.reduce((sum, midi) => sum + midi) / VIBRATO_FRAMES;
    x += Math.cos(angle);
    y += Math.sin(angle);
  }
  return Math.atan2(y, x) / (2 * Math.PI);
}

/** Stretches that stay near one semitone, over gaps too short to be a rest. */
function findRuns(pitch: number[]): Run[] {
  const runs: Run[] = [];
  for (const [i, midi] of pitch.entries()) {
    if (Number.isNaN(midi)) continue;
    const run = runs.at(-1);
    // 0.7, not 0.5: a vibrato of half a semitone stays one note.
    if (run && Math.abs(midi - run.midi) < 0.7 && i - run.to < SHORTEST_FRAMES) run.to = i + 1;
    else runs.push({ midi: Math.round(midi), from: i, to: i + 1 });
  }
  return runs;
}

/** Leaves out blips, and lets the notes around one meet in its middle, or be one if they are the same. */
function joinOverBlips(runs: Run[], pitch: number[]): Run[] {
  const notes = runs.filter(({ from, to }) => to - from >= SHORTEST_FRAMES);
  const joined: Run[] = [];
  for (const run of notes) {
    const before = joined.at(-1);
    const between = before ? pitch.slice(before.to, run.from) : [];
    if (!before || between.length > 2 * SHORTEST_FRAMES || between.some(Number.isNaN)) {
      joined.push(run);
    } else if (before.midi === run.midi) {
      before.to = run.to;
    } else {
      const middle = Math.round((before.to + run.from) / 2);
      before.to = middle;
      joined.push({ ...run, from: middle });
    }
  }
  return joined;
}

/** A note that was struck again while it sounded becomes several. */
function splitAtStrikes(run: Run, frames: Frame[]): Run[] {
  const pieces: Run[] = [];
  let from = run.from;
  for (let i = from + SHORTEST_FRAMES; i <= run.to - SHORTEST_FRAMES; i++) {
    const here = rise(frames, i);
    const steepest = here >= rise(frames, i - 1) && here > rise(frames, i + 1);
    if (here < STRIKE_DB || !steepest || i - from < SHORTEST_FRAMES) continue;
    pieces.push({ ...run, from, to: i });
    from = i;
  }
  return [...pieces, { ...run, from }];
}

/** How much louder it becomes around a frame, in dB over 40 ms. */
function rise(frames: Frame[], i: number): number {
  const after = frames[Math.min(frames.length - 1, i + STRIKE_FRAMES)];
  return after.db - frames[Math.max(0, i - STRIKE_FRAMES)].db;
}

function median(values: number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1];
}

function roundMs(seconds: number): number {
  return Math.round(seconds * 1_000) / 1_000;
}

const NAMES = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"];

/** The name of a MIDI number: 60 is C4. */
export function noteName(midi: number): string {
  return NAMES[midi % 12] + (Math.floor(midi / 12) - 1);
}

/** A standard MIDI file with one track; `tempoBpm` in quarter notes a minute. */
export function toMidi(notes: Note[], title: string, tempoBpm: number): Uint8Array {
  const midi = new tonejs.Midi();
  midi.header.setTempo(tempoBpm);
  const track = midi.addTrack();
  // The encoder writes one byte per character, so the bytes are handed over as characters.
  track.name = String.fromCharCode(...new TextEncoder().encode(title));
  for (const note of notes) {
    track.addNote({ midi: note.midi, time: note.start_s, duration: note.duration_s });
  }
  return midi.toArray();
}

/** Sixteenths in a bar of 4/4. */
const BAR = 16;
const BARS_PER_LINE = 4;
/** What one note head, dotted or not, can last; anything else is tied together from these. */
const LENGTHS = [16, 12, 8, 6, 4, 3, 2, 1];

/** A tune in ABC 2.1, on a grid of sixteenths that begins with the first note. */
export function toAbc(notes: Note[], title: string, tempoBpm: number): string {
  const bars: string[] = [];
  let bar = "";
  let at = 0;
  let accidentals = new Accidentals();
  for (const { midi, length } of [...onGrid(notes, tempoBpm)]) {
    for (let left = length; left > 0;) {
      const now = LENGTHS.find((one) => one <= Math.min(left, BAR - at))!;
      // A space at each beat ends the beam.
      if (at > 0 && at % 4 === 0) bar += " ";
      bar += midi === null ? "z" : accidentals.spell(midi);
      if (now > 1) bar += now;
      if (midi !== null && now < left) bar += "-";
      left -= now;
      at += now;
      if (at < BAR) continue;
      bars.push(bar);
      bar = "";
      at = 0;
      accidentals = new Accidentals();
    }
  }
  const lines: string[] = [];
  for (let i = 0; i < bars.length; i += BARS_PER_LINE) {
    lines.push(bars.slice(i, i + BARS_PER_LINE).join(" | "));
  }
  const head = `%abc-2.1\nX:1\nT:${abcText(title)}\nM:4/4\nL:1/16\nQ:1/4=${
    Math.round(tempoBpm)
  }\nK:C\n`;
  return `${head}${lines.join(" |\n")} |]\n`;
}

/** Notes and rests, in sixteenths, up to the end of the last bar. */
function* onGrid(
  notes: Note[],
  tempoBpm: number,
): Generator<{ midi: number | null; length: number }> {
  const step = 60 / tempoBpm / 4;
  const origin = notes[0]?.start_s ?? 0;
  let at = 0;
  for (const [i, { midi, start_s, duration_s }] of notes.entries()) {
    const start = Math.max(at, Math.round((start_s - origin) / step));
    if (start > at) yield { midi: null, length: start - at };
    const ends = Math.round((start_s + duration_s - origin) / step);
    const next = notes[i + 1]
      ? Math.round((notes[i + 1].start_s - origin) / step)
      : Math.ceil(ends / 4) * 4;
    // A sixteenth of silence before the next note is how it was played, not a rest to read.
    at = Math.max(start + 1, next - ends <= 1 ? next : ends);
    yield { midi, length: at - start };
  }
  if (at % BAR > 0 || at === 0) yield { midi: null, length: BAR - at % BAR };
}

/**
 * Spells pitches under K:C within one bar. ABC 2.1 carries an accidental through all octaves by
 * default, many readers only through its own: it is written unless both would read it right.
 */
class Accidentals {
  private readonly inOctave = new Map<string, string>();
  private readonly inBar = new Map<string, string>();

  spell(midi: number): string {
    const [letter, sharp] = NAMES[midi % 12];
    const octave = Math.floor(midi / 12) - 1;
    const name = octave >= 5
      ? letter.toLowerCase() + "'".repeat(octave - 5)
      : letter + ",".repeat(4 - octave);
    const accidental = sharp ? "^" : "=";
    const read = [this.inOctave.get(name) ?? "=", this.inBar.get(letter) ?? "="];
    if (read.every((one) => one === accidental)) return name;
    this.inOctave.set(name, accidental);
    this.inBar.set(letter, accidental);
    return accidental + name;
  }
}

/** Text for an ABC field: %, \ and & begin comments, escapes and entities there. */
function abcText(text: string): string {
  return text.replace(/[%\\&]/g, "\\$&");
}
