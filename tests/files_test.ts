/** Files in chunks: whole, bounded, and gone when no job came for them. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { type Pool, schema, via } from "../db.ts";
import {
  baseName,
  CHUNK_BYTES,
  FileTooLarge,
  inputsOf,
  outputsOf,
  readFile,
  writeFile,
} from "../files.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { databaseTest as test } from "./database.ts";

const kinds = ["a"];
const worker = (sql: Pool) =>
  processes.register(sql, { role: "worker", name: "t", version: "0", kinds });

async function claimOne(sql: Pool, worker: string, leaseS = 60): Promise<queue.Job> {
  const options = { worker, kinds, most: 1, leaseS, token: crypto.randomUUID() };
  return (await claims.claim(sql, { queue: "default", claim: "skip_locked" }, options))[0];
}

/** Bytes that differ from chunk to chunk, in pieces of uneven length. */
function pieces(total: number, size: number): [Uint8Array, ReadableStream<Uint8Array>] {
  const all = Uint8Array.from({ length: total }, (_, i) => (i * 31 + (i >> 12)) & 255);
  let at = 0;
  return [
    all,
    new ReadableStream({
      pull(controller) {
        if (at >= total) return controller.close();
        controller.enqueue(all.slice(at, at + size));
        at += size;
      },
    }),
  ];
}

const stream = (text: string) => new Blob([text]).stream() as ReadableStream<Uint8Array>;
const age = async (sql: Pool) =>
  await sql`update ${sql(schema)}.files set created_at = created_at - interval '2 h'`;
const count = async (sql: Pool, table: string) =>
  (await sql`select count(*)::integer as n from ${sql(schema)}.${sql(table)}`)[0].n;

test("what is written comes back byte for byte, whatever its length and pieces", async (sql) => {
  const lengths = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5];
  for (const length of lengths) {
    for (const size of [65_536, CHUNK_BYTES, 2_500_001]) {
      const [all, content] = pieces(length, size);
      const file = await writeFile(via(sql), "x.wav", content, 10_000_000);
      assertEquals([file.bytes, file.media_type], [length, "audio/wav"]);
      const back = new Uint8Array(await new Response(readFile(via(sql), file)).arrayBuffer());
      assert(back.length === all.length && back.every((byte, i) => byte === all[i]), `${length}`);
    }
  }
  const [{ most }] = await sql`select max(length(data)) as most from ${sql(schema)}.file_chunks`;
  assertEquals(most, CHUNK_BYTES);
});

test("a file may be as large as the limit and no larger, and a refused one leaves nothing", async (sql) => {
  await writeFile(via(sql), "x", stream("12345"), 5);
  const error = await assertRejects(
    () => writeFile(via(sql), "dir/x.wav", stream("123456"), 5),
    FileTooLarge,
  );
  assertEquals(error.message, "x.wav is larger than 5 bytes (SIDING_MAX_FILE_BYTES)");
  assertEquals([await count(sql, "files"), await count(sql, "file_chunks")], [1, 1]);
});

test("a job takes complete files only, and several jobs may take the same", async (sql) => {
  const file = await writeFile(via(sql), "x", stream("12345"), 5);
  const [one, two] = await queue.enqueue(sql, [
    { kind: "a", files: [file.id] },
    { kind: "a", files: [file.id, file.id] },
  ]);
  assertEquals((await inputsOf(via(sql), one.id)).map((f) => f.id), [file.id]);
  assertEquals((await inputsOf(via(sql), two.id)).map((f) => f.id), [file.id, file.id]);
  const [{ id }] = await sql`insert into ${sql(schema)}.files (name, media_type)
    values ('half', 'text/plain') returning id::text`;
  await assertRejects(
    () => queue.enqueue(sql, [{ kind: "a", files: [id] }]),
    queue.EnqueueError,
    `file ${id} is not complete`,
  );
});

test("files that no job came for are swept after their grace, those of jobs stay", async (sql) => {
  const mine = await writeFile(via(sql), "mine", stream("1"), 5);
  await writeFile(via(sql), "loose", stream("2"), 5);
  await queue.enqueue(sql, [{ kind: "a", files: [mine.id] }]);
  assertEquals((await queue.sweep(sql, 3600, 3600)).files, 0, "within the grace");
  await age(sql);
  assertEquals((await queue.sweep(sql, 3600, 3600)).files, 1);
  const left = await sql`select name from ${sql(schema)}.files`;
  assertEquals(left.map((row) => row.name), ["mine"]);
  assertEquals(await count(sql, "file_chunks"), 1);
});

test("a file of a job that a unique key turned away stays loose and is swept", async (sql) => {
  const [first, second] = [
    await writeFile(via(sql), "first", stream("1"), 5),
    await writeFile(via(sql), "second", stream("2"), 5),
  ];
  const job = { kind: "a", unique_key: "k" };
  const entries = await queue.enqueue(sql, [
    { ...job, files: [first.id] },
    { ...job, files: [second.id] },
  ]);
  assertEquals(entries.map((entry) => entry.created), [true, false]);
  assertEquals((await inputsOf(via(sql), entries[0].id)).map((f) => f.name), ["first"]);
  await age(sql);
  assertEquals((await queue.sweep(sql, 3600, 3600)).files, 1);
});

test("outputs are seen only through the finish of the attempt that wrote them", async (sql) => {
  const id = await worker(sql);
  const [entry] = await queue.enqueue(sql, [{ kind: "a" }]);
  const lost = await claimOne(sql, id, 0);
  await writeFile(via(sql), "from-the-lost", stream("1"), 5, lost);
  await queue.recover(sql);
  const job = await claimOne(sql, id);
  await writeFile(via(sql), "from-the-second", stream("22"), 5, job);
  assertEquals(await outputsOf(via(sql), entry.id), [], "not before the finish");
  await age(sql);
  assertEquals(
    (await queue.sweep(sql, 3600, 3600)).files,
    1,
    "the lost attempt's, not the running one's",
  );
  await queue.finish(sql, id, job, null);
  await queue.sweep(sql, 3600, 3600);
  const outputs = await outputsOf(via(sql), entry.id);
  assertEquals(outputs.map(({ name, bytes }) => [name, bytes]), [["from-the-second", 2]]);
});

test("files go with the last job that has them, as input or output", async (sql) => {
  const id = await worker(sql);
  const input = await writeFile(via(sql), "in", stream("1"), 5);
  await queue.enqueue(sql, [{ kind: "a", files: [input.id] }]);
  const first = await claimOne(sql, id);
  const output = await writeFile(via(sql), "out", stream("2"), 5, first);
  await queue.finish(sql, id, first, null, [{ kind: "a", files: [output.id, input.id] }]);
  await sql`update ${
    sql(schema)
  }.jobs set finished_at = now() - interval '2 h' where id = ${first.id}`;
  await age(sql);
  assertEquals(await queue.sweep(sql, 3600, 3600), { jobs: 1, files: 0, processes: 0 });
  const second = await claimOne(sql, id);
  assertEquals((await inputsOf(via(sql), second.id)).map((f) => f.name), ["out", "in"]);
  await queue.finish(sql, id, second, null);
  await sql`update ${sql(schema)}.jobs set finished_at = now() - interval '2 h'`;
  assertEquals(await queue.sweep(sql, 3600, 3600), { jobs: 1, files: 2, processes: 0 });
  assertEquals([await count(sql, "files"), await count(sql, "file_chunks")], [0, 0]);
});

test("a file that vanishes while it is read is an error, and never a short file", async (sql) => {
  const [, content] = pieces(3 * CHUNK_BYTES, CHUNK_BYTES);
  const file = await writeFile(via(sql), "x", content, 10_000_000);
  await sql`delete from ${sql(schema)}.file_chunks where number = 2`;
  await assertRejects(
    () => new Response(readFile(via(sql), file)).arrayBuffer(),
    Error,
    `file ${file.id} is gone: its chunk 2 is missing`,
  );
});

test("a file that is swept while it is written is an error, and never a file that is not there", async (sql) => {
  for (const chunks of [1, 2]) {
    let sent = 0;
    const content = new ReadableStream<Uint8Array>({
      async pull(controller) {
        // After the first chunk: the second finds its file gone, or the end does.
        if (sent === 1) await sql`delete from ${sql(schema)}.files`;
        if (sent++ === chunks) return controller.close();
        controller.enqueue(new Uint8Array(CHUNK_BYTES));
      },
    }, { highWaterMark: 0 });
    await assertRejects(
      () => writeFile(via(sql), "slow.wav", content, 10_000_000),
      Error,
      "slow.wav was swept while it was written",
    );
  }
});

Deno.test("a name is cut to its last part, and never leaves its folder", () => {
  const names: [string, string][] = [
    ["song.wav", "song.wav"],
    ["../../etc/passwd", "passwd"],
    ["C:\\music\\song.wav", "song.wav"],
    ["..", "file"],
    ["", "file"],
    ["a/", "file"],
    ["a\nb\0c", "a_b\ufffdc"],
    ["x".repeat(300) + ".wav", "x".repeat(248) + "….wav"],
    ["é".repeat(200) + ".wav", "é".repeat(124) + "….wav"],
  ];
  for (const [name, expected] of names) assertEquals(baseName(name), expected);
});
