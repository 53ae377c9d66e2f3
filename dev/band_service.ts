#!/usr/bin/env -S deno run -A
/**
 * A service that charges for each request: the stand-in for a real one, for the kind `band`. It
 * arranges a recording for a band, and takes its time. What it knows is in memory, and ends with it.
 *
 *     deno task band-service --port 8090
 *     curl localhost:8090/mood -d '{"mood": "charge-and-drop", "requests": 1}'
 *
 *     POST /requests?title=…   with an Idempotency-Key and the recording: {"id"}; charged once a key
 *     GET /requests/ID         {"id", "status": "working" | "done" | "failed", "progress", …}
 *     GET /requests?key=KEY    the same, of the request under this key
 *     GET /charges             {"items": [{"key", "id", "calls", "charges"}]}
 *     POST /mood               how the next requests go: see {@linkcode moods}
 *
 * A reply of 4xx or 503 means that nothing was charged. SIGINT and SIGTERM stop it, at once.
 *
 * Exit codes: 0 stopped; 1 failure; 2 usage.
 */
import { createHash } from "node:crypto";
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { json } from "node:stream/consumers";
import { z } from "zod";
import * as config from "../config.ts";
import { pause } from "../db.ts";

/** How a `POST /requests` can go. All of it is decided, and charged, when its body has arrived. */
export const moods = [
  "fine",
  /** Charges, and replies only after `slowMs`. */
  "slow",
  /** Replies 503, and charges nothing. */
  "refuse",
  /** Closes the connection, and charges nothing. */
  "drop",
  /** Charges, and closes the connection without a reply. */
  "charge-and-drop",
  /** Charges, and writes its reply twice, as a middlebox that misbehaves. */
  "twice",
  /** Replies 503 to everything but /charges and /mood, and charges nothing. */
  "down",
] as const;
export type Mood = typeof moods[number];

/** What came in under one key. */
export interface Charge {
  key: string;
  /** The request's id; null while none was accepted. */
  id: string | null;
  /** How often it was sent to here, whole. */
  calls: number;
  /** How often money was taken for it. */
  charges: number;
}

export interface BandServiceOptions {
  port?: number;
  hostname?: string;
  /** How long the work on a request takes, from when it was charged. */
  workMs?: number;
  /** How long it keeps its reply to itself in the mood `slow`. */
  slowMs?: number;
  /** How long after its charge it replies to any request. */
  replyMs?: number;
  /** False: it charges again for a key that it has charged for, as a service that knows no keys. */
  honoursKeys?: boolean;
}

/** A service that runs. */
export interface BandService extends AsyncDisposable {
  url: string;
  /** As `GET /charges`. */
  charges(): Charge[];
  /** As `POST /mood`: how the next so many requests go, or all until it is changed. */
  setMood(mood: Mood, requests?: number): void;
}

const program = {
  name: "band-service",
  summary: "Runs a service that charges for each request, for the kind `band`.",
  example: "deno task band-service --port 8090",
  exits: { 0: "after a stop", 3: null },
};
const spec = {
  port: config.flag(config.int(8090, 0, 65_535, "where it listens; 0 is any free port")),
  workMs: config.flag(config.int(2000, 1, 3_600_000, "how long the work on a request takes")),
  slowMs: config.flag(config.int(3000, 0, 3_600_000, "how late it replies in the mood `slow`")),
};

export async function main(args: string[], signal: AbortSignal): Promise<number> {
  await using service = await startBandService(config.configuration(program, spec, args));
  console.log(service.url);
  if (!signal.aborted) await once(signal, "abort");
  return 0;
}

/** Starts the service, on any free port of this machine unless told otherwise. */
export async function startBandService(options: BandServiceOptions = {}): Promise<BandService> {
  const { port = 0, hostname = "127.0.0.1", workMs = 2000, slowMs = 3000 } = options;
  const desk = new Desk(workMs, options.honoursKeys ?? true);
  const over = new AbortController();
  const late = (mood: Mood) =>
    pause((options.replyMs ?? 0) + (mood === "slow" ? slowMs : 0), over.signal);
  const server = createServer((req, res) => {
    // What is left to fail here is the connection.
    serve(desk, req, res, late).catch(() => req.socket.destroy());
  });
  server.listen(port, hostname);
  await once(server, "listening");
  return {
    url: `http://${hostname}:${(server.address() as AddressInfo).port}`,
    charges: () => desk.charges(),
    setMood: (mood, requests) => desk.setMood(mood, requests),
    async [Symbol.asyncDispose]() {
      over.abort();
      const closed = once(server, "close");
      server.close();
      server.closeAllConnections();
      await closed;
    },
  };
}

interface Request {
  id: string;
  title: string;
  bytes: number;
  chargedAtMs: number;
}

/** What the service knows and does, apart from HTTP. Nothing here awaits anything. */
class Desk {
  #mood: Mood = "fine";
  #left = Infinity;
  /** What was accepted, by key: this is what makes a second charge impossible. */
  readonly #requests = new Map<string, Request>();
  /** Counted apart from that, so that a fault there would show as a second charge. */
  readonly #charges = new Map<string, Charge>();

  constructor(readonly workMs: number, readonly honoursKeys: boolean) {}

  get isDown(): boolean {
    return this.#mood === "down";
  }

  setMood(mood: Mood, requests = Infinity): void {
    this.#mood = mood;
    this.#left = requests;
  }

  /** The mood for a request that has arrived. */
  takeMood(): Mood {
    const mood = this.#mood;
    if (--this.#left <= 0) this.setMood("fine");
    return mood;
  }

  charges(): Charge[] {
    return [...this.#charges.values()].map((charge) => ({ ...charge }));
  }

  /** Counts a call under a key. */
  call(key: string): Charge {
    const charge = this.#charges.get(key) ?? { key, id: null, calls: 0, charges: 0 };
    this.#charges.set(key, charge);
    charge.calls++;
    return charge;
  }

  /** Accepts a request and charges for it, unless that was done under its key before. */
  accept(charge: Charge, title: string, bytes: number): { id: string; isNew: boolean } {
    const known = this.#requests.get(charge.key);
    if (known && this.honoursKeys) return { id: known.id, isNew: false };
    const id = crypto.randomUUID();
    this.#requests.set(charge.key, { id, title, bytes, chargedAtMs: performance.now() });
    charge.id = id;
    charge.charges++; // the money is taken
    return { id, isNew: true };
  }

  byKey(key: string): Request | undefined {
    return this.#requests.get(key);
  }

  byId(id: string): Request | undefined {
    return this.#requests.values().find((request) => request.id === id);
  }

  /** A request as it is shown. */
  show({ id, title, bytes, chargedAtMs }: Request) {
    const progress = Math.min(1, (performance.now() - chargedAtMs) / this.workMs);
    if (progress < 1) return { id, status: "working", progress };
    return bytes === 0
      ? {
        id,
        status: "failed",
        progress,
        error: "there is nothing to hear: the recording is empty",
      }
      : { id, status: "done", progress, result: arrange(title) };
  }
}

async function serve(
  desk: Desk,
  req: IncomingMessage,
  res: ServerResponse,
  late: (mood: Mood) => Promise<void>,
): Promise<void> {
  const { pathname, searchParams } = new URL(req.url!, "http://band");
  const route = `${req.method} ${pathname}`;
  if (route === "GET /charges") return reply(res, 200, { items: desk.charges() });
  if (route === "POST /mood") return await setMood(desk, req, res);
  if (route === "POST /requests") {
    return await receive(desk, req, res, searchParams.get("title") ?? "Untitled", late);
  }
  if (desk.isDown) return refuse(res, 503, "the service is down");
  const key = searchParams.get("key");
  const id = /^GET \/requests\/([^/]+)$/.exec(route)?.[1];
  const found = route === "GET /requests" && key !== null ? desk.byKey(key) : id && desk.byId(id);
  return found ? reply(res, 200, desk.show(found)) : refuse(res, 404, "there is no such request");
}

/** Takes a request in, as the mood of the moment has it. */
async function receive(
  desk: Desk,
  req: IncomingMessage,
  res: ServerResponse,
  title: string,
  late: (mood: Mood) => Promise<void>,
): Promise<void> {
  // Counted and let go. Half a recording, of a client that went away, throws and is no call.
  let bytes = 0;
  for await (const chunk of req) bytes += chunk.length;
  const key = req.headers["idempotency-key"];
  if (typeof key !== "string" || key === "") {
    return refuse(res, 400, "the header Idempotency-Key is missing");
  }
  // From here to the charge nothing waits: it is made at one instant, or not at all.
  const charge = desk.call(key);
  const mood = desk.takeMood();
  if (mood === "refuse") return refuse(res, 503, "the service takes no requests just now");
  if (mood === "down") return refuse(res, 503, "the service is down");
  if (mood === "drop") return void req.socket.destroy();
  const { id, isNew } = desk.accept(charge, title, bytes);
  if (mood === "charge-and-drop") return void req.socket.destroy();
  await late(mood);
  const status = isNew ? 201 : 200;
  if (mood === "twice") req.socket.write(rawReply(status, { id }));
  reply(res, status, { id });
}

async function setMood(desk: Desk, req: IncomingMessage, res: ServerResponse): Promise<void> {
  const schema = z.strictObject({
    mood: z.enum(moods),
    requests: z.number().int().min(1).optional(),
  });
  const wanted = schema.safeParse(await json(req).catch(() => undefined));
  if (!wanted.success) {
    return refuse(res, 400, `wanted is {"mood", "requests"?}, and a mood is ${moods.join(", ")}`);
  }
  desk.setMood(wanted.data.mood, wanted.data.requests);
  reply(res, 200, wanted.data);
}

const refuse = (res: ServerResponse, status: number, error: string) =>
  reply(res, status, { error });

function reply(res: ServerResponse, status: number, body: unknown): void {
  res.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
}

/** A reply as it goes over the wire. */
function rawReply(status: number, body: unknown): string {
  const text = JSON.stringify(body);
  return `HTTP/1.1 ${status} OK\r\ncontent-type: application/json\r\n` +
    `content-length: ${new TextEncoder().encode(text).length}\r\n\r\n${text}`;
}

/** Chords in C major, from the root up, as ABC notes. */
const CHORDS = ["CEG", "DFA", "EGB", "FAc", "GBd", "Ace"];
const BARS = 8;

/** An arrangement that depends on the title alone: four in a bar, in eighths, over its own chords. */
function arrange(title: string) {
  const dice = createHash("sha256").update(title).digest();
  const chords = Array.from({ length: BARS }, (_, bar) => CHORDS[dice[bar] % CHORDS.length]);
  const melody = ([...notes]: string, bar: number) =>
    // The first beat has the root, the others what the dice say: two bits each.
    [0, 2, 4, 6].map((bits) => notes[bits && ((dice[BARS + bar] >> bits) & 3) % 3] + "2").join(" ");
  const parts: [string, string, string[]][] = [
    ["Trumpet", "treble", chords.map(melody)],
    ["Piano", "treble", chords.map((notes) => `[${notes}]4 [${notes}]4`)],
    ["Bass", "bass", chords.map(([root]) => `${root},4 ${root},2 ${root},2`)],
  ];
  // Neither a line break nor what ABC takes for a comment, an escape or an entity.
  const plain = title.replace(/[\p{Cc}%\\&]/gu, " ");
  const tempo = 80 + dice[31] % 80;
  return {
    title,
    parts: parts.map(([instrument, clef, bars], index) => ({
      instrument,
      abc: `X:${index + 1}\nT:${plain}\nT:${instrument}\nM:4/4\nL:1/8\nQ:1/4=${tempo}\n` +
        `K:C clef=${clef}\n${bars.join(" | ")} |]\n`,
    })),
  };
}

if (import.meta.main) await config.runMain("band-service", main);
