/**
 * The files of jobs, in the database, since on Railway a site and its workers share no disk.
 *
 * A file goes in and out chunk by chunk (1 MiB), so that neither side holds it whole. Until some
 * job takes it as an input, or the attempt that wrote it finishes its job, it is loose, and the
 * sweep removes it after an hour: a writer may die anywhere here and leave nothing for good.
 */
import { codeOf, cut, type Pool, schema, type Via } from "./db.ts";
import type { Claimed } from "./queue.ts";

/** A file was written so slowly that the sweep took it for one that no job came for. */
export class FileSwept extends Error {
  override name = "FileSwept";
  constructor(file: string) {
    super(`${file} was swept while it was written: it took longer than SIDING_FILE_GRACE_S`);
  }
}

/** Bytes of a chunk. */
export const CHUNK_BYTES = 1_048_576;

/** A file of a job, without its bytes. */
export interface FileInfo {
  id: string;
  name: string;
  media_type: string;
  bytes: number;
}

/** A file is larger than the limit. Nothing of it is kept. */
export class FileTooLarge extends Error {
  override name = "FileTooLarge";
}

const mediaTypes: Record<string, string> = {
  wav: "audio/wav",
  mp3: "audio/mpeg",
  mid: "audio/midi",
  abc: "text/vnd.abc",
  json: "application/json",
  txt: "text/plain",
  csv: "text/csv",
  pdf: "application/pdf",
  png: "image/png",
  jpg: "image/jpeg",
  svg: "image/svg+xml",
};

/** The media type that a name's ending says. */
export function mediaTypeOf(name: string): string {
  return mediaTypes[name.split(".").at(-1)!.toLowerCase()] ?? "application/octet-stream";
}

/**
 * Writes a file from a stream.
 *
 * @param name its name, whose folders are left away
 * @param maxBytes the largest size allowed
 * @param maker the attempt whose output it is; none for an upload
 * @throws FileTooLarge, or what the stream or the database failed with; then nothing of it is kept,
 * as far as the database can be told so
 */
export async function writeFile(
  db: Via,
  name: string,
  content: ReadableStream<Uint8Array>,
  maxBytes: number,
  maker?: Claimed,
): Promise<FileInfo> {
  const base = baseName(name);
  const media_type = mediaTypeOf(base);
  const [{ id }] = await db.run((sql) =>
    sql<{ id: string }[]>`
    insert into ${sql(schema)}.files (name, media_type, job_id, attempt)
    values (${base}, ${media_type}, ${maker?.id ?? null}, ${maker?.attempt ?? null})
    returning id::text`
  );
  try {
    const bytes = await writeChunks(db, { id, name: base }, content, maxBytes);
    const rows = await db.run((sql) =>
      sql`
      update ${
        sql(schema)
      }.files set complete = true, bytes = ${bytes} where id = ${id} returning id`
    );
    if (rows.length === 0) throw new FileSwept(base);
    return { id, name: base, media_type, bytes };
  } catch (error) {
    // The sweep would, in an hour; until then a large part of a file takes room.
    await db.run((sql) => sql`delete from ${sql(schema)}.files where id = ${id}`).catch(() => {});
    throw error;
  }
}

/** @returns how many bytes it has */
async function writeChunks(
  db: Via,
  { id, name }: Pick<FileInfo, "id" | "name">,
  content: ReadableStream<Uint8Array>,
  maxBytes: number,
): Promise<number> {
  let bytes = 0;
  let number = 0;
  for await (const chunk of chunksOf(content)) {
    bytes += chunk.length;
    if (bytes > maxBytes) {
      throw new FileTooLarge(`${name} is larger than ${maxBytes} bytes (SIDING_MAX_FILE_BYTES)`);
    }
    const at = number++;
    // The driver would send bytes as hexadecimal text, half as long again as base64.
    const base64 = chunk.toBase64();
    // A repeated chunk is the same chunk: the reply to the first may have been lost.
    await db.run((sql) =>
      sql`
      insert into ${
        sql(schema)
      }.file_chunks (file_id, number, data) values (${id}, ${at}, decode(${base64}, 'base64'))
      on conflict do nothing`
    ).catch((error) => {
      throw codeOf(error) === "23503" ? new FileSwept(name) : error; // its row is gone
    });
  }
  return bytes;
}

/**
 * Reads a file as a stream, a chunk at a time.
 *
 * @throws Error in the stream when the file vanishes meanwhile, rather than end early
 */
export function readFile(
  db: Via,
  { id, bytes }: Pick<FileInfo, "id" | "bytes">,
): ReadableStream<Uint8Array> {
  let number = 0;
  return new ReadableStream({
    async pull(controller) {
      if (number * CHUNK_BYTES >= bytes) return controller.close();
      const at = number++;
      const [row] = await db.run((sql) =>
        sql<{ base64: string }[]>`
        select encode(data, 'base64') as base64 from ${
          sql(schema)
        }.file_chunks where file_id = ${id} and number = ${at}`
      );
      if (!row) throw new Error(`file ${id} is gone: its chunk ${at} is missing`);
      controller.enqueue(Uint8Array.fromBase64(row.base64));
    },
  }, { highWaterMark: 1 });
}

/** A job's input files, in the order given at its enqueue. */
export async function inputsOf(db: Via, jobId: string): Promise<FileInfo[]> {
  return await list(db, (sql) =>
    sql<FileInfo[]>`
    select f.id::text, f.name, f.media_type, f.bytes::float8 as bytes
    from ${sql(schema)}.job_inputs i join ${sql(schema)}.files f on f.id = i.file_id
    where i.job_id = ${jobId} order by i.position`);
}

/** A job's output files: those of the attempt that finished it. */
export async function outputsOf(db: Via, jobId: string): Promise<FileInfo[]> {
  return await list(db, (sql) =>
    sql<FileInfo[]>`
    select f.id::text, f.name, f.media_type, f.bytes::float8 as bytes
    from ${sql(schema)}.files f join ${sql(schema)}.jobs j on j.id = f.job_id
    where f.job_id = ${jobId} and f.attempt = j.attempt and f.kept and j.status = 'done'
    order by f.name, f.id`);
}

const list = async (db: Via, f: (sql: Pool) => Promise<FileInfo[]>) => Array.from(await db.run(f));

/** The last part of a path, without what could be one or would not show; at most 255 bytes. */
export function baseName(name: string): string {
  const base = cut(name, 5000).split(/[\\/]/).at(-1)!.replace(/\p{Cc}/gu, "_");
  if (base === "" || base === "." || base === "..") return "file";
  if (new TextEncoder().encode(base).length <= 255) return base;
  const ending = /\.[a-zA-Z0-9]{1,10}$/.exec(base)?.[0] ?? "";
  return cut(base.slice(0, base.length - ending.length), 255 - ending.length) + ending;
}

/** Cuts a stream into pieces of {@linkcode CHUNK_BYTES}, the last one shorter. */
async function* chunksOf(content: ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array> {
  let buffer = new Uint8Array(CHUNK_BYTES);
  let used = 0;
  for await (const piece of content) {
    let rest = piece;
    while (rest.length > 0) {
      const part = rest.subarray(0, CHUNK_BYTES - used);
      buffer.set(part, used);
      used += part.length;
      rest = rest.subarray(part.length);
      if (used === CHUNK_BYTES) {
        yield buffer;
        buffer = new Uint8Array(CHUNK_BYTES);
        used = 0;
      }
    }
  }
  if (used > 0) yield buffer.subarray(0, used);
}
