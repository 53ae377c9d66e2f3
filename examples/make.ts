/**
 * Makes the example recordings: `deno run --allow-write=examples examples/make.ts`.
 *
 * Each is a short melody of the project's own (or a scale), played by a small synthesizer, and what
 * was played is known exactly, so that the tests can compare. The same bytes come out every time.
 */

/** A note as played: `start_s` when it is struck, `duration_s` until it is let go. */
export interface PlayedNote {
  midi: number;
  start_s: number;
  duration_s: number;
}

type Format = "int8" | "int16" | "int24" | "float32";

interface Voice {
  /** Amplitude of each overtone, the fundamental first. */
  overtones: number[];
  attackS: number;
  releaseS: number;
  /** Time in which a held note fades to a third; absent for one that does not fade. */
  fadeS?: number;
  /** Deviation in semitones, 5.5 times a second, beginning 0.15 s into the note. */
  vibrato?: number;
}

interface Recording {
  file: string;
  title: string;
  tempo_bpm: number;
  voice: Voice;
  /** The part of its length for which a note is held. */
  held: number;
  rateHz: number;
  channels: 1 | 2;
  format: Format;
  /** Peak of the background noise, of full scale. */
  noise?: number;
  /** Cents above 440 Hz tuning. */
  sharpCents?: number;
  /** Notes and rests (R), each with its length in beats: "C4:1 R:0.5 F#4:2". */
  phrase: string;
}

const odd = (count: number, power: number) =>
  Array.from({ length: count }, (_, i) => i % 2 === 0 ? 1 / (i + 1) ** power : 0);

const sine: Voice = { overtones: [1], attackS: 0.012, releaseS: 0.04 };
const triangle: Voice = { overtones: odd(9, 2), attackS: 0.01, releaseS: 0.03 };
const clarinet: Voice = { overtones: odd(11, 1.1), attackS: 0.03, releaseS: 0.04, vibrato: 0.2 };
const organ: Voice = {
  overtones: [0.8, 1, 0.3, 0.6, 0, 0.25, 0, 0.3],
  attackS: 0.015,
  releaseS: 0.03,
};
const plucked: Voice = {
  overtones: [1, 0.6, 0.45, 0.3, 0.2, 0.12, 0.08],
  attackS: 0.003,
  releaseS: 0.03,
  fadeS: 0.45,
};
const bell: Voice = { overtones: [1, 0.4, 0.15], attackS: 0.002, releaseS: 0.05, fadeS: 0.3 };
const violin: Voice = {
  overtones: [1, 0.8, 0.6, 0.5, 0.35, 0.3, 0.2, 0.15, 0.1],
  attackS: 0.05,
  releaseS: 0.06,
  vibrato: 0.35,
};

const recordings: Recording[] = [
  {
    file: "01-up-the-stairs.wav",
    title: "Up the Stairs",
    tempo_bpm: 160,
    voice: sine,
    held: 0.9,
    rateHz: 22_050,
    channels: 1,
    format: "int16",
    phrase: "C4:1 D4:1 E4:1 F4:1 G4:1 A4:1 B4:1 C5:1",
  },
  {
    file: "02-minor-ladder.wav",
    title: "Minor Ladder",
    tempo_bpm: 150,
    voice: triangle,
    held: 0.85,
    rateHz: 44_100,
    channels: 1,
    format: "int16",
    phrase: "A3:0.5 C4:0.5 E4:0.5 A4:0.5 C5:0.5 A4:0.5 E4:0.5 C4:0.5 A3:2",
  },
  {
    file: "03-knock-knock.wav",
    title: "Knock, Knock",
    tempo_bpm: 120,
    voice: plucked,
    held: 1,
    rateHz: 16_000,
    channels: 1,
    format: "int16",
    phrase: "G3:0.5 G3:0.5 G3:1 C4:0.5 C4:0.5 C4:1 G3:0.5 G3:0.5 E3:1 C3:2",
  },
  {
    file: "04-cellar-walk.wav",
    title: "Cellar Walk",
    tempo_bpm: 132,
    voice: organ,
    held: 0.85,
    rateHz: 11_025,
    channels: 1,
    format: "int16",
    phrase: "E2:1 G2:1 A2:1 Bb2:0.5 A2:0.5 G2:1 E2:1 D2:1 C2:2",
  },
  {
    file: "05-icicles.wav",
    title: "Icicles",
    tempo_bpm: 150,
    voice: bell,
    held: 1,
    rateHz: 32_000,
    channels: 1,
    format: "int16",
    phrase: "C6:0.5 E6:0.5 G6:0.5 C7:1 B6:0.5 G6:0.5 E6:0.5 C6:2",
  },
  {
    file: "06-half-steps.wav",
    title: "Half Steps",
    tempo_bpm: 120,
    voice: triangle,
    held: 1,
    rateHz: 24_000,
    channels: 1,
    format: "int8",
    phrase: "E4:0.5 F4:0.5 F#4:0.5 G4:0.5 G#4:0.5 A4:0.5 G#4:0.5 G4:0.5 F#4:0.5 F4:0.5 E4:2",
  },
  {
    file: "07-evening-song.wav",
    title: "Evening Song",
    tempo_bpm: 112,
    voice: violin,
    held: 0.92,
    rateHz: 48_000,
    channels: 1,
    format: "int16",
    phrase: "A4:1 B4:0.5 C#5:0.5 D5:1 A4:1.5",
  },
  {
    file: "08-two-rooms.wav",
    title: "Two Rooms",
    tempo_bpm: 140,
    voice: clarinet,
    held: 0.85,
    rateHz: 22_050,
    channels: 2,
    format: "int16",
    phrase: "D4:1 F4:0.5 E4:0.5 D4:1 A3:1 Bb3:0.5 C4:0.5 D4:2",
  },
  {
    file: "09-paper-boat.wav",
    title: "Paper Boat",
    tempo_bpm: 126,
    voice: sine,
    held: 0.8,
    rateHz: 22_050,
    channels: 1,
    format: "int24",
    phrase: "G4:0.75 A4:0.25 B4:1 G4:0.75 A4:0.25 B4:1 D5:1 C5:0.5 A4:0.5",
  },
  {
    file: "10-rain-gauge.wav",
    title: "Rain Gauge",
    tempo_bpm: 110,
    voice: { ...plucked, fadeS: 0.25 },
    held: 1,
    rateHz: 16_000,
    channels: 1,
    format: "float32",
    sharpCents: 25,
    phrase: "E3:0.5 B3:0.5 E4:0.5 G4:0.5 F#4:0.5 B3:0.5 E4:2",
  },
  {
    file: "11-over-the-wire.wav",
    title: "Over the Wire",
    tempo_bpm: 120,
    voice: { ...sine, vibrato: 0.3 },
    held: 0.85,
    rateHz: 8_000,
    channels: 1,
    format: "int8",
    noise: 0.01,
    phrase: "F4:1 A4:1 C5:1 A4:0.5 Bb4:0.5 G4:1 E4:1 F4:2",
  },
  {
    file: "12-waiting-room.wav",
    title: "Waiting Room",
    tempo_bpm: 120,
    voice: triangle,
    held: 0.85,
    rateHz: 11_025,
    channels: 2,
    format: "int24",
    noise: 0.03,
    phrase: "C5:0.5 R:0.5 C5:0.5 R:0.5 Eb5:1 R:1 G4:0.5 G4:0.5 C5:1",
  },
  {
    file: "13-seven-league-boots.wav",
    title: "Seven-League Boots",
    tempo_bpm: 120,
    voice: organ,
    held: 0.9,
    rateHz: 22_050,
    channels: 1,
    format: "int16",
    phrase: "C3:0.5 C4:0.5 C5:0.5 C4:0.5 F3:0.5 F4:0.5 F5:0.5 F4:0.5 C3:2",
  },
  {
    file: "14-mill-wheel.wav",
    title: "Mill Wheel",
    tempo_bpm: 120,
    voice: clarinet,
    held: 1,
    rateHz: 44_100,
    channels: 1,
    format: "int16",
    phrase: "D4:0.25 E4:0.25 F4:0.25 G4:0.25 A4:0.5 D4:0.5 Bb4:0.5 A4:0.5 D4:1",
  },
];

const LEAD_IN_S = 0.15;
const TAIL_S = 0.25;
const LETTERS: Record<string, number> = { C: 0, D: 2, E: 4, F: 5, G: 7, A: 9, B: 11 };

/** The shipped recordings and the notes that each one plays. */
export const melodies: (Pick<Recording, "file" | "title" | "tempo_bpm"> & {
  rate_hz: number;
  channels: number;
  notes: PlayedNote[];
})[] = recordings.map((recording) => ({
  file: recording.file,
  title: recording.title,
  tempo_bpm: recording.tempo_bpm,
  rate_hz: recording.rateHz,
  channels: recording.channels,
  notes: play(recording),
}));

/** The bytes of one shipped recording. */
export function makeWav(file: string): Uint8Array {
  const recording = recordings.find((one) => one.file === file);
  if (!recording) throw new Error(`${file} is not one of the example recordings`);
  const { rateHz, channels, format } = recording;
  const sound = mix(recording);
  const bytesPerSample = { int8: 1, int16: 2, int24: 3, float32: 4 }[format];
  const dataBytes = sound.length * channels * bytesPerSample;
  const view = new DataView(new ArrayBuffer(44 + dataBytes + dataBytes % 2));
  const text = (at: number, chars: string) =>
    [...chars].forEach((char, i) => view.setUint8(at + i, char.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, format === "float32" ? 3 : 1, true);
  view.setUint16(22, channels, true);
  view.setUint32(24, rateHz, true);
  view.setUint32(28, rateHz * channels * bytesPerSample, true);
  view.setUint16(32, channels * bytesPerSample, true);
  view.setUint16(34, bytesPerSample * 8, true);
  text(36, "data");
  view.setUint32(40, dataBytes, true);
  const noise = randomNumbers(recording.title.length);
  let at = 44;
  for (const sample of sound) {
    for (let channel = 0; channel < channels; channel++) {
      // The second microphone stands further away.
      const heard = sample * (channel === 0 ? 1 : 0.6) + (recording.noise ?? 0) * noise();
      writeSample(view, at, heard, format);
      at += bytesPerSample;
    }
  }
  return new Uint8Array(view.buffer);
}

/** When each note of the phrase is struck and let go. */
function play({ phrase, tempo_bpm, held }: Recording): PlayedNote[] {
  const notes: PlayedNote[] = [];
  let at = LEAD_IN_S;
  for (const item of phrase.split(" ")) {
    const [name, beats] = item.split(":");
    const lengthS = Number(beats) * 60 / tempo_bpm;
    if (name !== "R") notes.push({ midi: midiOf(name), start_s: at, duration_s: lengthS * held });
    at += lengthS;
  }
  return notes;
}

function midiOf(name: string): number {
  const [, letter, accidental, octave] = name.match(/^([A-G])([#b]?)(\d)$/)!;
  const shift = { "#": 1, b: -1, "": 0 }[accidental]!;
  return 12 * (Number(octave) + 1) + LETTERS[letter] + shift;
}

/** All notes of a recording in one channel, at a peak of half of full scale. */
function mix(recording: Recording): Float64Array {
  const notes = play(recording);
  const last = notes.at(-1)!;
  const lengthS = last.start_s + last.duration_s + TAIL_S;
  const sound = new Float64Array(Math.round(lengthS * recording.rateHz));
  for (const note of notes) addNote(sound, note, recording);
  const peak = sound.reduce((highest, sample) => Math.max(highest, Math.abs(sample)), 0);
  return sound.map((sample) => sample * 0.5 / peak);
}

function addNote(sound: Float64Array, note: PlayedNote, recording: Recording): void {
  const { rateHz, voice, sharpCents = 0 } = recording;
  const hz = 440 * 2 ** ((note.midi - 69 + sharpCents / 100) / 12);
  const from = Math.round(note.start_s * rateHz);
  const length = Math.min(
    sound.length - from,
    Math.round((note.duration_s + voice.releaseS) * rateHz),
  );
  let phase = 0;
  for (let i = 0; i < length; i++) {
    const t = i / rateHz;
    const attack = Math.min(1, t / voice.attackS);
    const release = Math.min(1, (note.duration_s + voice.releaseS - t) / voice.releaseS);
    const fade = voice.fadeS ? Math.exp(-t / voice.fadeS) : 1;
    const swing = t > 0.15 ? Math.sin(2 * Math.PI * 5.5 * (t - 0.15)) : 0;
    phase += 2 * Math.PI * hz * 2 ** ((voice.vibrato ?? 0) * swing / 12) / rateHz;
    for (const [k, amplitude] of voice.overtones.entries()) {
      // Overtones above the rate's limit would sound as other notes; near it vibrato reaches over.
      if (amplitude === 0 || hz * (k + 1) > 0.45 * rateHz) continue;
      // High overtones of a string die first.
      const dull = voice.fadeS ? fade ** (1 + k / 2) : 1;
      sound[from + i] += amplitude * attack * release * dull * Math.sin((k + 1) * phase);
    }
  }
}

function writeSample(view: DataView, at: number, sample: number, format: Format): void {
  if (format === "int8") {
    view.setUint8(at, 128 + Math.round(sample * 127));
  } else if (format === "int16") {
    view.setInt16(at, Math.round(sample * 32_767), true);
  } else if (format === "int24") {
    const value = Math.round(sample * 8_388_607);
    view.setUint16(at, value & 0xffff, true);
    view.setInt8(at + 2, value >> 16);
  } else {
    // Rounded, so that the last digits of a machine's sine don't show in the bytes.
    view.setFloat32(at, Math.round(sample * 2 ** 20) / 2 ** 20, true);
  }
}

/** Noise from -1 to 1, the same in every run (mulberry32). */
function randomNumbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 31 - 1;
  };
}

if (import.meta.main) {
  for (const { file } of melodies) {
    await Deno.writeFile(new URL(file, import.meta.url), makeWav(file));
  }
}
