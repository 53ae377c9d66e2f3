/**
 * The job kind `transcribe`: the script as a worker runs it, on the shipped recordings, and its
 * parts on sounds and files made here.
 */

import {
  assert,
  assertAlmostEquals,
  assertEquals,
  assertLess,
  assertRejects,
  assertStringIncludes,
} from "@std/assert";
import tonejs from "@tonejs/midi";
import { makeWav, melodies } from "../examples/make.ts";
import { ANALYSIS_RATE_HZ, findNotes, type Note, PitchTracker, toAbc } from "../jobs/notes.ts";
import { openWav, resample, WavError } from "../jobs/wav.ts";

const SCRIPT = new URL("../jobs/transcribe.ts", import.meta.url);
const EXAMPLES = new URL("../examples/", import.meta.url);

interface Line {
  stage?: string;
  progress?: number;
  error?: string;
  retry?: boolean;
  result?: {
    title: string;
    duration_s: number;
    sample_rate_hz: number;
    channels: number;
    tempo_bpm: number;
    note_count: number;
    notes: (Note & { name: string })[];
    notes_cut?: boolean;
  };
}

interface Run {
  code: number;
  lines: Line[];
  last: Line;
  abc: string;
  midi: Uint8Array;
}

/** Runs the script as a worker does: a work folder, the job on stdin, the permissions of its shebang. */
async function runScript(stdin: string, wav?: Uint8Array): Promise<Run> {
  const folder = await Deno.makeTempDir();
  try {
    await Deno.mkdir(`${folder}/in/0`, { recursive: true });
    await Deno.mkdir(`${folder}/out`);
    if (wav) await Deno.writeFile(`${folder}/in/0/recording.wav`, wav);
    const shebang = (await Deno.readTextFile(SCRIPT)).split("\n")[0];
    const child = new Deno.Command(Deno.execPath(), {
      args: ["run", ...shebang.match(/--allow\S+/g)!, SCRIPT.href],
      cwd: folder,
      stdin: "piped",
      stdout: "piped",
      stderr: "piped",
    }).spawn();
    const writer = child.stdin.getWriter();
    await writer.write(new TextEncoder().encode(stdin));
    await writer.close();
    const { code, stdout } = await child.output();
    const lines = new TextDecoder().decode(stdout).split("\n").filter(Boolean)
      .map((line) => JSON.parse(line));
    const done = lines.at(-1)?.result !== undefined;
    return {
      code,
      lines,
      last: lines.at(-1),
      abc: done ? await Deno.readTextFile(`${folder}/out/score.abc`) : "",
      midi: done ? await Deno.readFile(`${folder}/out/score.mid`) : new Uint8Array(),
    };
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
}

function transcribe(wav: Uint8Array, payload: Record<string, unknown> = {}): Promise<Run> {
  const file = {
    name: "recording.wav",
    path: "in/0/recording.wav",
    media_type: "audio/wav",
    bytes: wav.length,
  };
  const job = { id: "7", kind: "transcribe", attempt: 1, owner: "ada", payload, files: [file] };
  return runScript(JSON.stringify(job), wav);
}

const shipped = new Map<string, Promise<Run>>();

/** The run on a shipped recording, made once for all tests. */
function transcribeShipped(melody: typeof melodies[number]): Promise<Run> {
  const { file, title, tempo_bpm } = melody;
  const run = shipped.get(file) ??
    Deno.readFile(new URL(file, EXAMPLES)).then((wav) => transcribe(wav, { title, tempo_bpm }));
  shipped.set(file, run);
  return run;
}

const pitches = (notes: { midi: number }[]) => notes.map(({ midi }) => midi);

Deno.test("transcribe finds every note of each shipped recording", async (t) => {
  for (const melody of melodies) {
    await t.step(melody.file, async () => {
      const { code, last: { result } } = await transcribeShipped(melody);
      assertEquals(code, 0);
      assert(result);
      assertEquals(pitches(result.notes), pitches(melody.notes));
      for (const [i, played] of melody.notes.entries()) {
        const { start_s, duration_s } = result.notes[i];
        assertAlmostEquals(start_s, played.start_s, 0.05, `start of note ${i + 1}`);
        // A fading note has no sharp end: 80 ms, or 15 % of a long one.
        const tolerance = Math.max(0.08, 0.15 * played.duration_s);
        assertAlmostEquals(duration_s, played.duration_s, tolerance, `length of note ${i + 1}`);
      }
      assertEquals(result.title, melody.title);
      assertEquals(result.tempo_bpm, melody.tempo_bpm);
      assertEquals(result.sample_rate_hz, melody.rate_hz);
      assertEquals(result.channels, melody.channels);
      assertEquals(result.note_count, melody.notes.length);
      assertEquals(result.notes_cut, undefined);
    });
  }
});

Deno.test("the MIDI file holds the notes of the result, at its times and tempo", async () => {
  for (const melody of melodies) {
    const { last: { result }, midi } = await transcribeShipped(melody);
    const { header, tracks: [track] } = new tonejs.Midi(midi);
    assertEquals(pitches(track.notes), pitches(result!.notes));
    for (const [i, note] of track.notes.entries()) {
      assertAlmostEquals(note.time, result!.notes[i].start_s, 0.002);
      assertAlmostEquals(note.duration, result!.notes[i].duration_s, 0.004);
    }
    assertAlmostEquals(header.tempos[0].bpm, melody.tempo_bpm, 0.01);
    assertEquals(track.name, melody.title);
  }
});

/**
 * Reads the pitches of an ABC tune under K:C, ties joined. Accidentals last for the bar, through
 * all octaves (`pitch`, the default of ABC 2.1) or their own (`octave`, as most readers have it).
 */
function readAbc(abc: string, rule: "pitch" | "octave"): number[] {
  const body = abc.split("\nK:C\n")[1];
  const heard: number[] = [];
  let tied = false;
  for (const bar of body.replaceAll("|]", "|").split("|").slice(0, -1)) {
    const accidentals = new Map<string, number>();
    let length = 0;
    const tokens = bar.matchAll(/([\^=]?)([A-Ga-g])([,']*)(\d*)(-?)|z(\d*)/g);
    for (const [, sign, letter, octaves, noteLength, tie, restLength] of tokens) {
      length += Number(noteLength || restLength || 1);
      if (!letter) continue;
      const key = rule === "pitch" ? letter.toUpperCase() : letter + octaves;
      if (sign) accidentals.set(key, sign === "^" ? 1 : 0);
      const octave = (letter < "a" ? 0 : 1) +
        [...octaves].reduce((sum, mark) => sum + (mark === "," ? -1 : 1), 0);
      const white = [9, 11, 0, 2, 4, 5, 7]["ABCDEFG".indexOf(letter.toUpperCase())];
      const midi = 60 + 12 * octave + white + (accidentals.get(key) ?? 0);
      if (tied) assertEquals(midi, heard.at(-1), "a tie joins equal pitches");
      else heard.push(midi);
      tied = tie === "-";
    }
    assertEquals(length, 16, `sixteenths in bar "${bar}"`);
  }
  return heard;
}

Deno.test("the ABC file reads back to the notes of the result under both rules for accidentals", async () => {
  for (const melody of melodies) {
    const { last: { result }, abc } = await transcribeShipped(melody);
    assertEquals(readAbc(abc, "pitch"), pitches(result!.notes));
    assertEquals(readAbc(abc, "octave"), pitches(result!.notes));
  }
});

Deno.test("the ABC file is what a musician would write", async () => {
  const expected = {
    "06-half-steps.wav": `%abc-2.1
X:1
T:Half Steps
M:4/4
L:1/16
Q:1/4=120
K:C
E2F2 ^F2G2 ^G2A2 G2=G2 | ^F2=F2 E8 z4 |]
`,
    "12-waiting-room.wav": `%abc-2.1
X:1
T:Waiting Room
M:4/4
L:1/16
Q:1/4=120
K:C
c2z2 c2z2 ^d4 z4 | G2G2 c4 z8 |]
`,
  };
  for (const [file, text] of Object.entries(expected)) {
    const { abc } = await transcribeShipped(melodies.find((one) => one.file === file)!);
    assertEquals(abc, text);
  }
});

/** Notes of equal length, in seconds, one after the other; null is a rest. */
function inARow(midis: (number | null)[], lengthS: number): Note[] {
  return midis.flatMap((midi, i) =>
    midi === null ? [] : [{ midi, start_s: i * lengthS, duration_s: lengthS }]
  );
}

const bodyOf = (notes: Note[], tempoBpm = 120) =>
  toAbc(notes, "t", tempoBpm).split("\nK:C\n")[1].trimEnd();

Deno.test("ABC: accidentals are written where either rule needs them, and end with the bar", () => {
  assertEquals(bodyOf(inARow([61, 61, 60, 61, 61, 60], 0.5)), "^C4 C4 =C4 ^C4 | ^C4 =C4 z8 |]");
  assertEquals(bodyOf(inARow([61, 72, 73, 60], 0.5)), "^C4 =c4 ^c4 =C4 |]");
  assertEquals(bodyOf(inARow([61, 72, 60, 72], 0.5)), "^C4 =c4 =C4 c4 |]");
});

Deno.test("ABC: lengths that no note head has are tied, also over bars, with the accidental again", () => {
  assertEquals(
    bodyOf([{ midi: 61, start_s: 0, duration_s: 2.625 }, {
      midi: 60,
      start_s: 2.625,
      duration_s: 1.375,
    }]),
    "^C16- | ^C4- C=C8-C3 |]",
  );
  assertEquals(
    bodyOf([{ midi: 36, start_s: 0, duration_s: 10 }]),
    "C,,16- | C,,16- | C,,16- | C,,16- |\nC,,16 |]",
  );
});

Deno.test("ABC: a tune of silence is one bar of rest, and a lead-in is not counted", () => {
  assertEquals(bodyOf([]), "z16 |]");
  const late = inARow([60, 62], 1).map((note) => ({ ...note, start_s: note.start_s + 0.37 }));
  assertEquals(bodyOf(late), "C8 D8 |]");
});

Deno.test("ABC: notes faster than the grid keep their order and number", () => {
  const trill = inARow([60, 62, 60, 62, 60, 62, 60, 62], 0.06);
  assertEquals(readAbc(toAbc(trill, "t", 60), "pitch"), pitches(trill));
});

Deno.test("a title stays one line of text in the ABC file", async () => {
  const title = "Air\r\nK:G\n\u2028X:2\u0085 100% \\ &amp; \ud800";
  const { last, abc } = await transcribe(makeWav(melodies[0].file), { title });
  assertEquals(last.result?.title, "Air K:G X:2 100% \\ &amp; \ufffd");
  const lines = abc.split("\n");
  assertEquals(lines[2], "T:Air K:G X:2 100\\% \\\\ \\&amp; \ufffd");
  assertEquals(lines.map((line) => line.slice(0, 2)).slice(1, 7), [
    "X:",
    "T:",
    "M:",
    "L:",
    "Q:",
    "K:",
  ]);
  const unnamed = await transcribe(makeWav(melodies[0].file), { title: " \n " });
  assertEquals(unnamed.last.result?.title, "Untitled");
});

Deno.test("stages come in order and progress never falls", async () => {
  for (const melody of melodies) {
    const { lines } = await transcribeShipped(melody);
    const reports = lines.slice(0, -1);
    const stages = reports.map(({ stage }) => stage);
    assertEquals([...new Set(stages)], ["decode", "pitch", "notes", "write"]);
    assertEquals(stages, stages.toSorted((a, b) => stages.indexOf(a) - stages.indexOf(b)));
    const progress = reports.map(({ progress }) => progress!);
    assertEquals(progress, progress.toSorted((a, b) => a - b));
    assert(progress.every((value) => value >= 0 && value <= 1));
  }
});

Deno.test("a long recording reports ten times a second, and its result stays below 1 MiB", async () => {
  const rate = 8_000;
  const noteS = 0.09;
  const count = 5_100;
  const samples = new Float64Array(count * noteS * rate);
  for (let i = 0; i < samples.length; i++) {
    const note = Math.floor(i / (noteS * rate));
    samples[i] = 0.5 * Math.sin(2 * Math.PI * (note % 2 ? 440 : 523.25) * i / rate);
  }
  const began = performance.now();
  const { last: { result }, lines } = await transcribe(wavOf([samples], { rate, bits: 8 }));
  const tookS = (performance.now() - began) / 1_000;
  assert(result && result.note_count > 5_000);
  assertEquals(result.notes.length, 5_000);
  assertEquals(result.notes_cut, true);
  assertLess(JSON.stringify(result).length, 2 ** 20);
  assertLess(lines.length, 10 * tookS + 5);
});

/** What is heard in a sound at a rate in Hz. */
async function listen(samples: Float32Array, rate = ANALYSIS_RATE_HZ): Promise<Note[]> {
  const tracker = new PitchTracker();
  async function* blocks() {
    for (let at = 0; at < samples.length; at += 5_000) yield samples.subarray(at, at + 5_000);
  }
  for await (const block of resample(blocks(), rate, ANALYSIS_RATE_HZ)) tracker.push(block);
  return findNotes(tracker.finish());
}

/** A sound of `lengthS` seconds; `at` gives the sample at a time in seconds. */
function sound(lengthS: number, at: (t: number) => number, rate = ANALYSIS_RATE_HZ): Float32Array {
  return Float32Array.from({ length: Math.round(lengthS * rate) }, (_, i) => at(i / rate));
}

const hzOf = (midi: number) => 440 * 2 ** ((midi - 69) / 12);

/** A bright tone: up to 20 overtones below 20 kHz, each softer than the one before. */
function bright(midi: number): (t: number) => number {
  const overtones = Math.min(20, Math.floor(20_000 / hzOf(midi)));
  return (t) => {
    let sum = 0;
    for (let k = 1; k <= overtones; k++) sum += Math.sin(2 * Math.PI * k * hzOf(midi) * t) / k;
    return 0.3 * sum;
  };
}

/** Repeatable noise, -1 to 1. */
function noise(): () => number {
  let state = 1;
  return () => (state = (state * 16_807) % 2_147_483_647) / 2 ** 30 - 1;
}

/** Noise through a resonance, in Hz: it has a pitch, but not one that a voice or string would make. */
function pipe(random: () => number, hz: number): () => number {
  const r = Math.exp(-Math.PI * 60 / ANALYSIS_RATE_HZ);
  let [last, before] = [0, 0];
  return () => {
    const next = 2 * r * Math.cos(2 * Math.PI * hz / ANALYSIS_RATE_HZ) * last - r * r * before;
    [last, before] = [next + 0.01 * random(), last];
    return last;
  };
}

Deno.test("silence, hum below hearing, an offset and noise are no notes and no error", async () => {
  const random = noise();
  let drift = 0;
  const sounds = {
    silence: () => 0,
    offset: () => 0.4,
    "white noise": () => 0.5 * random(),
    "brown noise": () => drift = 0.98 * drift + 0.05 * random(),
    rumble: (t: number) => 0.3 * Math.sin(2 * Math.PI * 12 * t),
    "wind in a pipe": pipe(random, 400),
    clicks: (t: number) => t % 0.5 < 1e-4 ? 0.9 : 0,
  };
  for (const [name, at] of Object.entries(sounds)) {
    assertEquals(await listen(sound(3, at)), [], name);
  }
  const { code, last, abc } = await transcribe(wavOf([new Float64Array(16_000)], { bits: 16 }));
  assertEquals(code, 0);
  assertEquals(last.result?.note_count, 0);
  assertStringIncludes(abc, "K:C\nz16 |]\n");
});

Deno.test("each semitone from G1 to E7 is heard in its octave, from a pure and a bright tone", async () => {
  for (let midi = 31; midi <= 100; midi++) {
    const pure = (t: number) => 0.5 * Math.sin(2 * Math.PI * hzOf(midi) * t);
    for (const tone of [pure, bright(midi)]) {
      assertEquals(pitches(await listen(sound(0.5, tone))), [midi]);
    }
  }
});

Deno.test("a high reed, all overtones as strong as the first, is not heard an octave low", async () => {
  for (const midi of [87, 88, 89, 94, 95]) {
    const reed = (t: number) => {
      let sum = 0;
      for (let hz = hzOf(midi); hz < 20_000; hz += hzOf(midi)) {
        sum += Math.sin(2 * Math.PI * hz * t);
      }
      return 0.1 * sum;
    };
    assertEquals(pitches(await listen(sound(0.5, reed))), [midi]);
  }
});

Deno.test("high notes of a telephone's 8,000 Hz and of a studio's 96,000 Hz are heard", async () => {
  for (const rate of [8_000, 11_025, 96_000]) {
    const c7 = sound(0.5, (t) => 0.4 * Math.sin(2 * Math.PI * hzOf(96) * t), rate);
    const [note] = await listen(c7, rate);
    assertEquals(note.midi, 96);
    assertAlmostEquals(note.duration_s, 0.5, 0.03);
  }
});

Deno.test("the same note struck again is two notes, also while it rings, with a gap of 40 ms or none", async () => {
  for (const midi of [36, 60, 84]) {
    const tone = bright(midi);
    const ringing = sound(1.2, (t) => tone(t) * Math.exp(-(t % 0.3) / 0.3));
    assertEquals(pitches(await listen(ringing)), [midi, midi, midi, midi]);
    const short = sound(1.2, (t) => t % 0.3 < 0.26 ? tone(t) : 0);
    assertEquals(pitches(await listen(short)), [midi, midi, midi, midi]);
  }
});

Deno.test("steps and leaps without a gap are cut where they happen", async () => {
  const steps = [60, 61, 60, 62, 74, 62, 55, 67, 36, 48];
  const tones = steps.map(bright);
  const heard = await listen(sound(2, (t) => tones[Math.floor(t * 5)](t)));
  assertEquals(pitches(heard), steps);
  for (const [i, note] of heard.entries()) assertAlmostEquals(note.start_s, i / 5, 0.04);
});

Deno.test("vibrato, tremolo, a sharp instrument and background noise leave a long note whole", async () => {
  const random = noise();
  const swing = (t: number) => Math.sin(2 * Math.PI * 5.5 * t);
  const sine = (hz: number) => (t: number) => 0.4 * Math.sin(2 * Math.PI * hz * t);
  const vibrato = (midi: number, depth: number, rate = 5.5) => (t: number) =>
    Math.sin(
      2 * Math.PI * hzOf(midi) * t +
        hzOf(midi) * Math.LN2 / 12 * depth * Math.sin(2 * Math.PI * rate * t) / rate,
    );
  const sounds = {
    "vibrato of 60 cents": vibrato(69, 0.6),
    "slow vibrato of 65 cents": vibrato(69, 0.65, 3.5),
    "vibrato of 40 cents, 40 cents sharp": vibrato(69.4, 0.4),
    "a microphone's offset": (t: number) => 0.5 * sine(440)(t) + 0.5,
    "tremolo of 4 dB": (t: number) => sine(440)(t) * 10 ** (2 * swing(t) / 20),
    "40 cents sharp": sine(hzOf(69.4)),
    "noise 10 dB below": (t: number) => sine(440)(t) + 0.15 * random(),
  };
  for (const [name, at] of Object.entries(sounds)) {
    assertEquals(pitches(await listen(sound(3, at))), [69], name);
  }
});

Deno.test("a mains hum 40 dB below the melody is not written down in its rests", async () => {
  const hum = (t: number) => 0.004 * Math.sin(2 * Math.PI * 100 * t);
  const tone = (t: number) => t % 0.5 < 0.25 ? 0.4 * Math.sin(2 * Math.PI * 440 * t) : 0;
  assertEquals(pitches(await listen(sound(2, (t) => tone(t) + hum(t)))), [69, 69, 69, 69]);
});

Deno.test("a few frames heard wrong neither break a note nor make one", () => {
  const heard = (...parts: [midi: number, frames: number][]) =>
    findNotes(parts.flatMap(([midi, frames]) => Array(frames).fill({ midi, db: -10 })));
  assertEquals(heard([60, 5], [72, 1], [60, 2], [48, 2], [60, 4]), [
    { midi: 60, start_s: 0, duration_s: 0.14 },
  ]);
  // Two notes at once, in a step without a gap, sound like a common lower one.
  assertEquals(heard([60, 20], [36, 4], [67, 20]), [
    { midi: 60, start_s: 0, duration_s: 0.22 },
    { midi: 67, start_s: 0.22, duration_s: 0.22 },
  ]);
  assertEquals(heard([NaN, 20], [67, 5], [NaN, 20]), []);
});

Deno.test("resampling keeps the length and lets no alias through", async () => {
  for (const [from, to] of [[48_000, 22_050], [8_000, 44_100], [44_100, 44_100]]) {
    const level = async (hz: number) => {
      const input = sound(1, (t) => Math.sin(2 * Math.PI * hz * t), from);
      const output: number[] = [];
      for await (const block of resample(ReadableStream.from([input]), from, to)) {
        output.push(...block);
      }
      assertAlmostEquals(output.length, to, 1);
      const middle = output.slice(to / 4, to * 3 / 4);
      return Math.sqrt(2 * middle.reduce((sum, sample) => sum + sample ** 2, 0) / middle.length);
    };
    assertAlmostEquals(await level(1_000), 1, 0.01);
    if (from > to) assertLess(await level(15_000), 0.01);
  }
});

interface WavOptions {
  rate?: number;
  bits?: number;
  float?: boolean;
  extensible?: boolean;
  /** Chunks between the header and the data. */
  before?: Uint8Array[];
  /** The size that the data chunk claims. */
  statedBytes?: number;
  /** Overwrites bytes of the fmt chunk's body. */
  patch?: Record<number, number[]>;
}

const ascii = (text: string) => Uint8Array.from(text, (char) => char.charCodeAt(0));

function u32(value: number): Uint8Array {
  const bytes = new Uint8Array(4);
  new DataView(bytes.buffer).setUint32(0, value, true);
  return bytes;
}

const join = (...parts: (Uint8Array | number[])[]) =>
  Uint8Array.from(parts.flatMap((part) => [...part]));

/** A chunk, padded to an even length. */
function chunk(id: string, body: Uint8Array, statedBytes = body.length): Uint8Array {
  const whole = new Uint8Array(8 + body.length + body.length % 2);
  whole.set(ascii(id));
  whole.set(u32(statedBytes), 4);
  whole.set(body, 8);
  return whole;
}

/** A WAV file of one array of samples (-1 to 1) per channel. */
function wavOf(channels: ArrayLike<number>[], options: WavOptions = {}): Uint8Array {
  const { rate = 8_000, bits = 16, float = false, extensible = false } = options;
  const format = new DataView(new ArrayBuffer(extensible ? 40 : 16));
  const code = float ? 3 : 1;
  format.setUint16(0, extensible ? 0xfffe : code, true);
  format.setUint16(2, channels.length, true);
  format.setUint32(4, rate, true);
  format.setUint32(8, rate * channels.length * bits / 8, true);
  format.setUint16(12, channels.length * bits / 8, true);
  format.setUint16(14, bits, true);
  const formatBytes = new Uint8Array(format.buffer);
  if (extensible) {
    format.setUint16(16, 22, true);
    format.setUint16(24, code, true);
    formatBytes.set(Uint8Array.fromHex("000000001000800000aa00389b71"), 26);
  }
  for (const [at, bytes] of Object.entries(options.patch ?? {})) formatBytes.set(bytes, Number(at));

  const data = new DataView(new ArrayBuffer(channels[0].length * channels.length * bits / 8));
  let at = 0;
  for (let i = 0; i < channels[0].length; i++) {
    for (const channel of channels) {
      writeSample(data, at, channel[i], bits, float);
      at += bits / 8;
    }
  }
  const body = new Uint8Array(data.buffer);
  const rest = [
    ascii("WAVE"),
    chunk("fmt ", formatBytes),
    ...options.before ?? [],
    chunk("data", body, options.statedBytes),
  ];
  const size = rest.reduce((sum, part) => sum + part.length, 0);
  const file = new Uint8Array(8 + size);
  file.set(ascii("RIFF"));
  file.set(u32(size), 4);
  let end = 8;
  for (const part of rest) {
    file.set(part, end);
    end += part.length;
  }
  return file;
}

function writeSample(
  data: DataView,
  at: number,
  value: number,
  bits: number,
  float: boolean,
): void {
  if (float) {
    if (bits === 32) data.setFloat32(at, value, true);
    else data.setFloat64(at, value, true);
    return;
  }
  const whole = Math.round(value * 2 ** (bits - 1));
  if (bits === 8) data.setUint8(at, whole + 128);
  else for (let byte = 0; byte < bits / 8; byte++) data.setUint8(at + byte, whole >> (8 * byte));
}

async function withFile<T>(bytes: Uint8Array, use: (path: string) => Promise<T>): Promise<T> {
  const folder = await Deno.makeTempDir();
  try {
    await Deno.writeFile(`${folder}/test.wav`, bytes);
    return await use(`${folder}/test.wav`);
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
}

function decode(bytes: Uint8Array): Promise<number[]> {
  return withFile(bytes, async (path) => {
    using wav = await openWav(path);
    const samples: number[] = [];
    for await (const block of wav.blocks()) samples.push(...block);
    assertEquals(samples.length, wav.header.frames);
    return samples;
  });
}

/** Values that every format holds exactly. */
const LEFT = [0, 0.5, -0.5, -1, 0.25];
const RIGHT = [0, 0.25, 0.5, -0.5, -0.75];
const MIXED = [0, 0.375, 0, -0.75, -0.25];

Deno.test("every sample format is read, mono and mixed down, plain and extensible", async () => {
  const formats = [[8], [16], [24], [32], [32, true], [64, true]] as [number, boolean?][];
  for (const [bits, float] of formats) {
    for (const extensible of [false, true]) {
      const options = { bits, float, extensible };
      assertEquals(await decode(wavOf([LEFT], options)), LEFT);
      assertEquals(await decode(wavOf([LEFT, RIGHT], options)), MIXED);
      assertEquals(await decode(wavOf([LEFT, RIGHT, LEFT, RIGHT], options)), MIXED);
    }
  }
});

Deno.test("what is not a number in a float recording is silence", async () => {
  assertEquals(await decode(wavOf([[0.5, NaN, Infinity]], { bits: 32, float: true })), [0.5, 0, 0]);
});

Deno.test("a recording longer than a block is read whole, and again", async () => {
  const long = Array.from({ length: 70_001 }, (_, i) => (i % 256 - 128) / 128);
  await withFile(wavOf([long]), async (path) => {
    using wav = await openWav(path);
    for (let pass = 0; pass < 2; pass++) {
      const samples: number[] = [];
      for await (const block of wav.blocks()) samples.push(...block);
      assertEquals(samples, long);
    }
  });
});

Deno.test("unknown chunks are skipped, also of an odd length and after the data", async () => {
  const before = [
    chunk("LIST", ascii("INFOx")),
    chunk("JUNK", new Uint8Array(28)),
    chunk("fact", u32(5)),
  ];
  assertEquals(await decode(wavOf([LEFT], { before })), LEFT);
  assertEquals(await decode(join(wavOf([LEFT]), chunk("LIST", ascii("INFO")))), LEFT);
});

Deno.test("a recorder that never wrote the length is read to the end of the file", async () => {
  for (const statedBytes of [0, 0xffffffff, 1_000_000]) {
    assertEquals(await decode(wavOf([LEFT], { statedBytes })), LEFT);
  }
  // Cut off inside the last frame.
  assertEquals(await decode(wavOf([LEFT, RIGHT]).subarray(0, -1)), MIXED.slice(0, -1));
});

Deno.test("what is not a readable WAV is refused with the file, the value and the rule", async () => {
  const good = wavOf([LEFT]);
  const patched = (at: number, ...bytes: number[]) => wavOf([LEFT], { patch: { [at]: bytes } });
  const riff = (...chunks: Uint8Array[]) => join(ascii("RIFF"), u32(100), ascii("WAVE"), ...chunks);
  const starting = (text: string) => join(ascii(text), new Uint8Array(40));
  const cases: [Uint8Array, string][] = [
    [new Uint8Array(), "test.wav is empty; a WAV file is expected"],
    [ascii("RIFF"), "test.wav is only 4 bytes long; a WAV file (RIFF/WAVE) is expected"],
    [starting("hello, this is no sound"), "test.wav is of an unknown format; a WAV"],
    [starting("ID3\x04"), "test.wav is an MP3 file; a WAV"],
    [starting("\xff\xfb\x90"), "test.wav is an MP3 file"],
    [starting("fLaC"), "test.wav is a FLAC file"],
    [starting("OggS"), "test.wav is an Ogg file"],
    [starting("\0\0\0\x20ftypM4A "), "test.wav is an MP4 or M4A file"],
    [starting("FORM\0\0\0\0AIFF"), "test.wav is an AIFF file"],
    [starting("RF64\xff\xff\xff\xffWAVE"), "test.wav is an RF64 file"],
    [good.subarray(0, 12), "test.wav has no fmt chunk: its header is cut off or damaged"],
    [good.subarray(0, 25), "test.wav has a fmt chunk of 5 bytes; at least 16 are needed"],
    [good.subarray(0, 36), "test.wav has no data chunk: its header is cut off or damaged"],
    [good.subarray(0, 44), "test.wav has no audio: its data chunk holds 0 bytes"],
    [riff(chunk("data", u32(0))), "test.wav has its data chunk before its fmt chunk"],
    [
      patched(0, 2, 0),
      "test.wav has format code 2 (Microsoft ADPCM); PCM (1) and float (3) are read",
    ],
    [patched(0, 17, 0), "test.wav has format code 17 (IMA ADPCM)"],
    [patched(0, 85, 0), "test.wav has format code 85 (MP3)"],
    [patched(0, 0x34, 0x12), "test.wav has format code 4660;"],
    [patched(0, 0xfe, 0xff), "test.wav has an extensible fmt chunk of 16 bytes; 40 are needed"],
    [patched(2, 0, 0), "test.wav has 0 channels; 1 to 64 are allowed"],
    [patched(2, 0xff, 0xff), "test.wav has 65535 channels; 1 to 64 are allowed"],
    [patched(4, 0, 0, 0, 0), "test.wav has a sample rate of 0 Hz; 2000 to 384000 are allowed"],
    [patched(4, 255, 255, 255, 255), "test.wav has a sample rate of 4294967295 Hz"],
    [patched(12, 7), "test.wav says 7 bytes per frame; 1 x 16 bits make 2"],
    [patched(14, 12), "test.wav has 12 bits per int sample; 8, 16, 24, 32 are allowed"],
    [patched(0, 3, 0), "test.wav has 16 bits per float sample; 32, 64 are allowed"],
    [
      wavOf([LEFT], { extensible: true, patch: { 26: [1] } }),
      "test.wav has sub-format 01000100000010008000",
    ],
  ];
  for (const [bytes, message] of cases) {
    await assertRejects(() => withFile(bytes, openWav), WavError, message);
  }
});

Deno.test("a recording that can't be read ends as an error not worth a retry", async () => {
  const { code, last } = await transcribe(ascii("ID3 not a wav, but a song"));
  assertEquals(code, 0);
  assertEquals(last, {
    error: "recording.wav is an MP3 file; a WAV file (RIFF/WAVE) is expected",
    retry: false,
  });
  const hours = await transcribe(
    wavOf([new Float64Array(2_000 * 3_601)], { rate: 2_000, bits: 8 }),
  );
  assertEquals(hours.last.error, "recording.wav lasts 3601 s; at most 3600 s are transcribed");
});

Deno.test("a payload or files out of range end as an error that names the value", async () => {
  const wav = makeWav(melodies[0].file);
  const tempo = await transcribe(wav, { tempo_bpm: 5 });
  assertEquals(tempo.last, {
    error: "tempo_bpm is 5; a number from 20 to 400 is expected",
    retry: false,
  });
  const title = await transcribe(wav, { title: 7 });
  assertEquals(title.last.error, "title is 7; a text is expected");
  const none = await runScript('{"payload": {}, "files": []}');
  assertEquals(none.last.error, "transcribe takes one WAV file; this job has 0");
});

Deno.test("what is not a job on stdin is a usage error, with nothing on stdout", async () => {
  for (const stdin of ["", "hello", "[]", '{"payload": {}}', '{"payload": {}, "files": [1]}']) {
    const { code, lines } = await runScript(stdin);
    assertEquals(code, 2);
    assertEquals(lines, []);
  }
});

Deno.test("a WAV of 200 MB is decoded without holding it in memory", async () => {
  const header = wavOf([[0], [0]], { rate: 44_100, statedBytes: 0xffffffff });
  await withFile(header, async (path) => {
    await Deno.truncate(path, 200_000_000);
    const code = `
      import { openWav } from ${JSON.stringify(new URL("../jobs/wav.ts", import.meta.url).href)};
      const before = Deno.memoryUsage().rss;
      let highest = 0;
      let frames = 0;
      using wav = await openWav(${JSON.stringify(path)});
      for await (const block of wav.blocks()) {
        frames += block.length;
        highest = Math.max(highest, Deno.memoryUsage().rss);
      }
      console.log(JSON.stringify({ frames, grew: highest - before }));
    `;
    const { stdout } = await new Deno.Command(Deno.execPath(), { args: ["eval", code] }).output();
    const { frames, grew } = JSON.parse(new TextDecoder().decode(stdout));
    assertEquals(frames, Math.floor((200_000_000 - 44) / 4));
    assertLess(grew, 60_000_000);
  });
});

Deno.test("the shipped recordings are what examples/make.ts makes, and small", async () => {
  let total = 0;
  for (const { file } of melodies) {
    const bytes = await Deno.readFile(new URL(file, EXAMPLES));
    assertEquals(await sha256(bytes), await sha256(makeWav(file)), file);
    total += bytes.length;
  }
  assertLess(total, 2_500_000);
});

async function sha256(bytes: Uint8Array): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", Uint8Array.from(bytes));
  return new Uint8Array(digest).toHex();
}
