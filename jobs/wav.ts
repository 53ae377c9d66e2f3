/**
 * Reads WAV files in blocks, mixed down to one channel, so that a recording of any length never
 * sits in memory as a whole.
 *
 * Understood: integer PCM of 8, 16, 24 and 32 bits, floats of 32 and 64, any number of channels up
 * to 64, plain and WAVE_FORMAT_EXTENSIBLE headers, and recorders that stopped without filling in
 * the length. Everything else is a {@linkcode WavError} that says what was found.
 */

import { basename } from "node:path";

/** The file is not a WAV that can be read; the message names the file, the value and the rule. */
export class WavError extends Error {
  override name = "WavError";
}

interface Format {
  sampleRateHz: number;
  channels: number;
  encoding: "int" | "float";
  bitsPerSample: number;
}

/** What the header says, with the length corrected by what the file really holds. */
export interface WavHeader extends Format {
  /** Where the samples begin, in bytes from the start of the file. */
  dataStart: number;
  /** Whole sample frames (one sample of each channel). */
  frames: number;
  durationS: number;
}

const MAX_CHANNELS = 64;
const MIN_RATE_HZ = 2_000;
const MAX_RATE_HZ = 384_000;
/** Real files have a handful; the bound keeps a crafted file from being walked 8 bytes at a time. */
const MAX_CHUNKS = 1_000;
const BLOCK_FRAMES = 32_768;

const PCM = 1;
const FLOAT = 3;
const EXTENSIBLE = 0xfffe;
const FORMAT_NAMES: Record<number, string> = {
  2: "Microsoft ADPCM",
  6: "A-law",
  7: "mu-law",
  17: "IMA ADPCM",
  80: "MPEG",
  85: "MP3",
  255: "AAC",
};

/** Bytes 2 to 15 of every sub-format GUID whose first two bytes are a format code. */
const GUID_TAIL = "000000001000800000aa00389b71";

/** How the beginnings of other files are recognised, to tell people what they sent. */
const OTHER_FILES: [start: RegExp, what: string][] = [
  [/^(ID3|\xff[\xe2-\xfb])/, "an MP3 file"],
  [/^fLaC/, "a FLAC file"],
  [/^OggS/, "an Ogg file"],
  [/^....ftyp/s, "an MP4 or M4A file"],
  [/^FORM....AIF/s, "an AIFF file"],
  [/^RF64/, "an RF64 file (a WAV above 4 GiB)"],
  [/^BW64/, "a BW64 file (a WAV above 4 GiB)"],
  [/^RIFX/, "a big-endian RIFX file"],
];

/**
 * Opens a WAV file, called `name` in messages, and reads its header. The caller closes it, best with `using`.
 *
 * @throws {WavError} when the file is not a WAV that can be read
 */
export async function openWav(path: string, name = basename(path)): Promise<Wav> {
  const file = await Deno.open(path);
  try {
    const { size } = await file.stat();
    return new Wav(file, await readHeader(file, size, name));
  } catch (error) {
    file.close();
    throw error;
  }
}

/** An open WAV file. */
export class Wav {
  constructor(private readonly file: Deno.FsFile, readonly header: WavHeader) {}

  /**
   * The samples from the start, each the mean of its channels, -1 to 1 for integer formats. A
   * block is valid until the next is asked for. It can be called again to read again.
   */
  async *blocks(): AsyncGenerator<Float32Array> {
    const { channels, bitsPerSample, dataStart, frames } = this.header;
    const sample = sampleReader(this.header);
    const sampleBytes = bitsPerSample / 8;
    const frameBytes = sampleBytes * channels;
    const mono = new Float32Array(BLOCK_FRAMES);
    const buffer = new Uint8Array(BLOCK_FRAMES * frameBytes);
    const view = new DataView(buffer.buffer);
    for (let done = 0; done < frames;) {
      const wanted = Math.min(BLOCK_FRAMES, frames - done) * frameBytes;
      const at = dataStart + done * frameBytes;
      const filled = await readInto(this.file, at, buffer.subarray(0, wanted));
      const got = Math.floor(filled / frameBytes);
      // The file became shorter since its header was read.
      if (got === 0) return;
      for (let frame = 0, at = 0; frame < got; frame++) {
        let sum = 0;
        for (let channel = 0; channel < channels; channel++, at += sampleBytes) {
          sum += sample(view, at);
        }
        mono[frame] = sum / channels;
      }
      yield mono.subarray(0, got);
      done += got;
    }
  }

  [Symbol.dispose](): void {
    this.file.close();
  }
}

/** A function that reads one sample of the header's format at a byte offset. */
function sampleReader(
  { encoding, bitsPerSample }: WavHeader,
): (view: DataView, at: number) => number {
  // A NaN or infinity in a float file would silence every sample after it in the filters.
  const finite = (value: number) => Number.isFinite(value) ? value : 0;
  switch (`${encoding}${bitsPerSample}`) {
    case "int8":
      return (view, at) => (view.getUint8(at) - 128) / 2 ** 7;
    case "int16":
      return (view, at) => view.getInt16(at, true) / 2 ** 15;
    case "int24":
      return (view, at) => (view.getInt8(at + 2) * 2 ** 16 + view.getUint16(at, true)) / 2 ** 23;
    case "int32":
      return (view, at) => view.getInt32(at, true) / 2 ** 31;
    case "float32":
      return (view, at) => finite(view.getFloat32(at, true));
    default:
      return (view, at) => finite(view.getFloat64(at, true));
  }
}

/** Walks the chunks up to `data`, which is the last one that matters. */
async function readHeader(file: Deno.FsFile, size: number, name: string): Promise<WavHeader> {
  const magic = latin1(await readAt(file, 0, 12));
  if (size === 0) throw new WavError(`${name} is empty; a WAV file is expected`);
  if (!/^RIFF....WAVE/s.test(magic)) {
    const other = OTHER_FILES.find(([start]) => start.test(magic))?.[1];
    const found = other ?? (size < 12 ? `only ${size} bytes long` : "of an unknown format");
    throw new WavError(`${name} is ${found}; a WAV file (RIFF/WAVE) is expected`);
  }
  let format: Format | null = null;
  for (let at = 12, chunk = 0; at + 8 <= size && chunk < MAX_CHUNKS; chunk++) {
    const head = await readAt(file, at, 8);
    const id = latin1(head.subarray(0, 4));
    const length = new DataView(head.buffer).getUint32(4, true);
    const start = at + 8;
    if (id === "fmt ") {
      format = parseFormat(await readAt(file, start, Math.min(length, 40)), name);
    } else if (id === "data") {
      if (!format) throw new WavError(`${name} has its data chunk before its fmt chunk`);
      return withLength(format, start, length, size, name);
    }
    // Chunks are padded to an even length, which their length does not count.
    at = start + length + length % 2;
  }
  const missing = format ? "data" : "fmt";
  throw new WavError(`${name} has no ${missing} chunk: its header is cut off or damaged`);
}

/** Checks the fmt chunk, every value of it by name. */
function parseFormat(bytes: Uint8Array<ArrayBuffer>, name: string): Format {
  if (bytes.length < 16) {
    throw new WavError(`${name} has a fmt chunk of ${bytes.length} bytes; at least 16 are needed`);
  }
  const view = new DataView(bytes.buffer);
  const channels = view.getUint16(2, true);
  const sampleRateHz = view.getUint32(4, true);
  const frameBytes = view.getUint16(12, true);
  const bitsPerSample = view.getUint16(14, true);
  const encoding = parseEncoding(view, bytes, name);
  if (channels < 1 || channels > MAX_CHANNELS) {
    throw new WavError(`${name} has ${channels} channels; 1 to ${MAX_CHANNELS} are allowed`);
  }
  if (sampleRateHz < MIN_RATE_HZ || sampleRateHz > MAX_RATE_HZ) {
    throw new WavError(
      `${name} has a sample rate of ${sampleRateHz} Hz; ${MIN_RATE_HZ} to ${MAX_RATE_HZ} are allowed`,
    );
  }
  const allowed = encoding === "int" ? [8, 16, 24, 32] : [32, 64];
  if (!allowed.includes(bitsPerSample)) {
    throw new WavError(
      `${name} has ${bitsPerSample} bits per ${encoding} sample; ${allowed.join(", ")} are allowed`,
    );
  }
  const expected = channels * bitsPerSample / 8;
  if (frameBytes !== expected) {
    throw new WavError(
      `${name} says ${frameBytes} bytes per frame; ${channels} x ${bitsPerSample} bits make ${expected}`,
    );
  }
  return { sampleRateHz, channels, encoding, bitsPerSample };
}

/** The encoding behind the format code, or behind the GUID of an extensible header. */
function parseEncoding(view: DataView, bytes: Uint8Array, name: string): "int" | "float" {
  let code = view.getUint16(0, true);
  if (code === EXTENSIBLE) {
    if (bytes.length < 40) {
      throw new WavError(
        `${name} has an extensible fmt chunk of ${bytes.length} bytes; 40 are needed`,
      );
    }
    const tail = bytes.subarray(26, 40).toHex();
    if (tail !== GUID_TAIL) {
      throw new WavError(
        `${name} has sub-format ${bytes.subarray(24, 40).toHex()}; PCM and float are read`,
      );
    }
    code = view.getUint16(24, true);
  }
  if (code === PCM) return "int";
  if (code === FLOAT) return "float";
  const known = FORMAT_NAMES[code] ? ` (${FORMAT_NAMES[code]})` : "";
  throw new WavError(`${name} has format code ${code}${known}; PCM (1) and float (3) are read`);
}

/** Adds where the samples are and how many. */
function withLength(
  format: Format,
  dataStart: number,
  stated: number,
  size: number,
  name: string,
): WavHeader {
  const held = size - dataStart;
  // A recorder that streams writes 0 or 0xffffffff and may never come back to correct it.
  const bytes = stated === 0 || stated > held ? held : stated;
  const frames = Math.floor(bytes / (format.channels * format.bitsPerSample / 8));
  if (frames === 0) {
    throw new WavError(`${name} has no audio: its data chunk holds ${bytes} bytes`);
  }
  return { ...format, dataStart, frames, durationS: frames / format.sampleRateHz };
}

/** Up to `length` bytes from `at`; fewer only where the file ends. */
async function readAt(
  file: Deno.FsFile,
  at: number,
  length: number,
): Promise<Uint8Array<ArrayBuffer>> {
  const bytes = new Uint8Array(length);
  return bytes.subarray(0, await readInto(file, at, bytes));
}

/** Fills a buffer from `at` on, and says how far: less than full only where the file ends. */
async function readInto(file: Deno.FsFile, at: number, bytes: Uint8Array): Promise<number> {
  await file.seek(at, Deno.SeekMode.Start);
  let filled = 0;
  while (filled < bytes.length) {
    const got = await file.read(bytes.subarray(filled));
    if (got === null) break;
    filled += got;
  }
  return filled;
}

function latin1(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes);
}

/** How far the sinc filter reaches, in its zero crossings on each side, and its table's steps per crossing. */
const CROSSINGS = 16;
const STEPS = 512;
const SINC = Float32Array.from({ length: CROSSINGS * STEPS + 1 }, (_, i) => {
  const x = Math.PI * i / STEPS;
  const window = 0.5 + 0.5 * Math.cos(x / CROSSINGS);
  return i === 0 ? 1 : window * Math.sin(x) / x;
});

/**
 * Brings mono blocks from one sample rate to another, in Hz, without aliases: a windowed sinc that
 * cuts at the lower of the two rates' limits.
 */
export async function* resample(
  blocks: AsyncIterable<Float32Array>,
  fromHz: number,
  toHz: number,
): AsyncGenerator<Float32Array> {
  if (fromHz === toHz) return yield* blocks;
  const cutoff = Math.min(1, toHz / fromHz);
  const reach = Math.ceil(CROSSINGS / cutoff);
  // Silence on both sides of the recording, for the filter to reach into.
  const silence = new Float32Array(reach);
  let held = silence;
  let heldFrom = -reach;
  let next = 0;
  const convert = (block: Float32Array): Float32Array => {
    const at = Math.max(0, Math.ceil(next * fromHz / toHz) - reach - heldFrom);
    const joined = new Float32Array(held.length - at + block.length);
    joined.set(held.subarray(at));
    joined.set(block, held.length - at);
    held = joined;
    heldFrom += at;
    const ends = Math.ceil((heldFrom + held.length - reach) * toHz / fromHz);
    const out = new Float32Array(Math.max(0, ends - next));
    for (let i = 0; i < out.length; i++, next++) {
      const centre = next * fromHz / toHz - heldFrom;
      const last = Math.min(held.length - 1, Math.floor(centre + reach));
      let sum = 0;
      for (let j = Math.max(0, Math.ceil(centre - reach)); j <= last; j++) {
        sum += held[j] * (SINC[Math.round(Math.abs(centre - j) * cutoff * STEPS)] ?? 0);
      }
      out[i] = sum * cutoff;
    }
    return out;
  };
  for await (const block of blocks) yield convert(block);
  yield convert(silence);
}
