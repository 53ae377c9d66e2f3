/** `deno task enqueue`, and a worker that transcribes what it was given. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { fileURLToPath } from "node:url";
import { deposit } from "../credits.ts";
import { connect } from "../db.ts";
import { melodies } from "../examples/make.ts";
import * as queue from "../queue.ts";
import { testDatabase } from "./database.ts";
import { startScript } from "./processes.ts";

const path = (name: string) => fileURLToPath(new URL(`../${name}`, import.meta.url));

async function run(url: string, ...args: string[]) {
  const { code, stdout, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", path("tools/enqueue.ts"), ...args],
    env: { DATABASE_URL: url, NO_COLOR: "1" },
  }).output();
  const decoder = new TextDecoder();
  return { code, out: decoder.decode(stdout), err: decoder.decode(stderr) };
}

Deno.test("enqueue prints the id, and the job is as its flags say", async () => {
  await using database = await testDatabase();
  const sql = connect(database.url, { max: 1 });
  try {
    await queue.setQueue(sql, "slow");
    await deposit(sql, "ada", 10);
    const args = [
      ...["transcribe", "--payload", '{"title": "Song"}', "--owner", "ada", "--queue", "slow"],
      ...["--priority", "-3", "--at", "2099-01-01T00:00:00Z", "--key", "k", "--price", "8"],
    ];
    const first = await run(database.url, ...args);
    assertEquals([first.code, first.out], [0, "1\n"]);
    const [job] = await queue.get(sql, ["1"]);
    assertEquals([job.kind, job.payload, job.owner, job.queue, job.priority, job.status], [
      ...["transcribe", { title: "Song" }, "ada", "slow", -3, "scheduled"],
    ]);
    assertEquals(job.due_at.toISOString(), "2099-01-01T00:00:00.000Z");
    assertEquals(job.price, "8");
    const again = await run(database.url, ...args, "--json");
    assertEquals(JSON.parse(again.out), { id: "1", created: false });
  } finally {
    await sql.end();
  }
});

Deno.test("enqueue refuses what cannot be, names it, and enqueues nothing", async () => {
  await using database = await testDatabase();
  const wrong: [string[], number, string][] = [
    [[], 2, "KIND is missing: there are transcribe"],
    [["sing"], 2, 'unknown kind "sing"'],
    [["transcribe", "more"], 2, 'not also "more"'],
    [["transcribe", "--payload", '{"tempo_bpm": 5}'], 2, "payload.tempo_bpm: "],
    [["transcribe", "--payload", '{"tempo": 90}'], 2, "tempo"],
    [["transcribe", "--payload", "{"], 2, "--payload is not JSON"],
    [["transcribe", "--at", "noon"], 2, '--at is "noon": it must be an instant'],
    [["transcribe", "--priority", "high"], 2, '--priority is "high": it must be a whole number'],
    [["transcribe", "--price", "0"], 2, '--price is "0": it must be a whole number from 1 to'],
    [["transcribe", "--price", "8"], 1, "price is 8 and owner is missing"],
    [["transcribe", "--price", "8", "--owner", "bob"], 1, 'owner "bob" has no account'],
    [["transcribe", "--file", "/no/such/file"], 2, "--file /no/such/file"],
    [["transcribe", "--file", path("tests")], 2, "it is not a file"],
    [["transcribe", "--file", path("deno.json"), "--max-file-bytes", "10"], 1, "the limit is 10"],
    [["transcribe", "--queue", "nowhere"], 1, 'queue "nowhere" does not exist'],
  ];
  for (const [args, code, message] of wrong) {
    const result = await run(database.url, ...args);
    assertEquals(result.code, code, args.join(" "));
    assertStringIncludes(result.err, message);
  }
  const sql = connect(database.url, { max: 1 });
  assertEquals(await queue.counts(sql), []);
  await sql.end();
});

Deno.test("enqueue --wait follows a recording to its score, and a job that fails to its error", async () => {
  await using database = await testDatabase();
  const flags = ["--heartbeat-ms", "200", "--poll-max-ms", "100"];
  await using _ = startScript("worker.ts", flags, { DATABASE_URL: database.url });
  const folder = await Deno.makeTempDir({ prefix: "siding test " });
  try {
    const melody = melodies[0];
    const recording = path(`examples/${melody.file}`);
    const { code, out, err } = await run(
      ...[database.url, "transcribe", "--file", recording, "--wait", "--json", "--out", folder],
    );
    assertEquals(code, 0, err);
    assertStringIncludes(err, "job 1: done");
    const { status, result, files } = JSON.parse(out);
    assertEquals(status, "done");
    assertEquals(
      result.notes.map((note: { midi: number }) => note.midi),
      melody.notes.map((note) => note.midi),
    );
    assertEquals(files.map((file: { name: string }) => file.name).sort(), [
      "score.abc",
      "score.mid",
    ]);
    for (const file of files) assertEquals((await Deno.stat(file.path)).size, file.bytes);
    const abc = await Deno.readTextFile(`${folder}/score.abc`);
    assert(abc.startsWith("%abc-2.1\nX:1\n"), abc);

    const failed = await run(database.url, "transcribe", "--file", path("deno.json"), "--wait");
    assertEquals(failed.code, 1);
    assertStringIncludes(failed.out, "job 2 failed: deno.json is ");
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
});
