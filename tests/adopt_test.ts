/** Siding in an app of another language or another queue, as docs/adopt.md and docs/jobs.md have it. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import { deposit } from "../credits.ts";
import { codeOf, connect, type Pool, via } from "../db.ts";
import { outputsOf, readFile, writeFile } from "../files.ts";
import { drainForTest, enqueue, kinds } from "../jobs/examples/kinds.ts";
import { process } from "../jobs/kind.ts";
import { typed } from "../jobs/typed.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, emptyDatabase, waitFor } from "./database.ts";
import { runScript, startWorker } from "./processes.ts";
import { startSite } from "./site.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const doc = (name: string) => Deno.readTextFileSync(`${root}docs/${name}.md`);
/** The code blocks of a page whose fence says exactly this. */
const blocks = (page: string, fence: string) =>
  [...doc(page).matchAll(/^ *```([^\n]+)\n(.*?)^ *```$/gms)]
    .filter(([, info]) => info === fence).map(([, , code]) => code);

/** Runs a program to its end, with `text` for its stdin. */
async function run(
  [program, ...args]: string[],
  text = "",
  options: Deno.CommandOptions = {},
) {
  const stdio = { stdin: "piped", stdout: "piped", stderr: "piped" } as const;
  const child = new Deno.Command(program, { args, ...options, ...stdio }).spawn();
  const writer = child.stdin.getWriter();
  // It may have ended without reading it.
  const told = writer.write(new TextEncoder().encode(text)).then(() => writer.close())
    .catch(() => {});
  const { code, stdout, stderr } = await child.output();
  await told;
  const decoder = new TextDecoder();
  return { code, out: decoder.decode(stdout), err: decoder.decode(stderr) };
}

const works = (...command: string[]) => run(command).then(({ code }) => code === 0, () => false);
const psqlThere = await works("psql", "--version");
const python = await works("python3", "--version");
/** A Python 3 that has psycopg: Debian's package is for Debian's Python. */
let psycopg = "";
for (const it of ["/usr/bin/python3", "python3"]) {
  if (await works(it, "-c", "import psycopg")) psycopg = it;
}

/** A test that needs a program; where it is not there it is skipped, and its name says so. */
function testWith(there: boolean, what: string, name: string, body: Parameters<typeof test>[1]) {
  if (there) test(name, body);
  else Deno.test.ignore(`${name} (skipped: there is no ${what})`, () => {});
}

async function psql(url: string, text: string): Promise<string> {
  const flags = ["-X", "-qAt", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose"];
  const { code, out, err } = await run(["psql", url, ...flags], text);
  assertEquals(code, 0, err);
  return out;
}

const all = async (sql: Pool) =>
  await queue.get(
    sql,
    (await sql`select id::text from siding.jobs order by id`).map(({ id }) => id),
  );
const stream = (text: string) => new Blob([text]).stream() as ReadableStream<Uint8Array>;

testWith(
  psqlThere,
  "psql",
  "docs/adopt.md: its SQL enqueues from psql, in the caller's transaction",
  async (sql, _, url) => {
    const [alone, many, ...more] = blocks("adopt", "sql");
    assertEquals(more, []);
    assertEquals(await psql(url, alone), "1\n");
    assertEquals(await psql(url, many), "1|2|t\n2|3|t\n");
    assertEquals((await all(sql)).map((job) => [job.kind, job.owner, job.payload, job.status]), [
      ["send_mail", "ada", { order: 7 }, "queued"],
      ["send_mail", "ada", { order: 8 }, "queued"],
      ["send_mail", null, { order: 9 }, "scheduled"],
    ]);
    const undone = alone.replace("7, 'paid'", "8, 'paid'").replace("order-7", "order-8")
      .replace("commit", "rollback");
    await psql(url, undone);
    assertEquals((await all(sql)).length, 3);
  },
);

testWith(psqlThere, "psql", "docs/adopt.md: its shell commands", async (sql, _, url) => {
  const PATH = `${dirname(Deno.execPath())}:${Deno.env.get("PATH")}`;
  const env = { DATABASE_URL: url, PATH, NO_COLOR: "1" };
  const outs = [];
  for (const block of blocks("adopt", "sh")) {
    const { code, out, err } = await run(["/bin/sh", "-eu"], block, { cwd: root, env });
    assertEquals(code, 0, err);
    outs.push(out);
  }
  assertEquals(outs[0], "up to date\n");
  assertStringIncludes(outs[1], "queued");
  const [job] = await all(sql);
  assertEquals([job.payload, job.status], [{ text: "It's late" }, "cancelled"]);
});

testWith(
  psycopg !== "",
  "Python with psycopg 3",
  "docs/adopt.md: its Python enqueues, and tells a refusal by its code",
  async (sql, _, url) => {
    const [block] = blocks("adopt", "python");
    const env = { DATABASE_URL: url };
    assertEquals(await run([psycopg, "-"], block, { env }), { code: 0, out: "1\n", err: "" });
    const [{ payload, owner, status }] = await all(sql);
    assertEquals([payload, owner, status], [{ order: 10 }, "ada", "scheduled"]);
    await queue.setQueue(sql, "default", { max_per_owner: 1 });
    const { out } = await run([psycopg, "-"], block, { env });
    assertStringIncludes(out, 'later: owner "ada" would have 2 unfinished jobs');
  },
);

test("siding.enqueue by arguments makes the job that enqueue makes", async (sql) => {
  const row = (id: string) =>
    sql`
    select queue, kind, owner, payload, priority, unique_key, status, price::text, webhook, trace_parent, due_at,
      failures, (select jsonb_agg(i.file_id order by i.position) from siding.job_inputs i where i.job_id = j.id) as files
    from siding.jobs j where id = ${id}`.then(([it]) => ({ ...it }));
  await deposit(sql, "ada", 10);
  await queue.setQueue(sql, "slow");
  const files = [];
  for (const name of ["a", "b"]) files.push((await writeFile(via(sql), name, stream(name), 10)).id);
  const [first] = await queue.enqueue(sql, [{
    ...{
      kind: "words",
      payload: { top: null, deep: [null] },
      queue: "slow",
      owner: "ada",
      priority: -3,
    },
    ...{ due_at: "2099-01-01T00:00:00.123456Z", files, price: 4, webhook: "https://x.example/" },
    ...{ trace_parent: "00-1-2-01" },
  }]);
  const [second] =
    await sql`select siding.enqueue('words', '{"top": null, "deep": [null]}', queue => 'slow',
    owner => 'ada', priority => -3, due_at => '2099-01-01T00:00:00.123456Z', price => 4,
    files => ${`{${files}}`}::text::bigint[], webhook => 'https://x.example/', trace_parent => '00-1-2-01')::text as id`;
  assert(first.id !== second.id);
  assertEquals(await row(second.id), await row(first.id));

  const [third] = await queue.enqueue(sql, [{ kind: "words" }]);
  const [fourth] = await sql`select siding.enqueue('words', null)::text as id`;
  const { due_at: _, ...plain } = await row(third.id);
  const { due_at: __, ...same } = await row(fourth.id);
  assertEquals(same, plain);
});

test("siding.enqueue: an unfinished job's key returns it as it is; tries elsewhere are counted for a new one", async (sql) => {
  const call = async (failed: number) => {
    const [{ id }] = await sql`
      select siding.enqueue('words', '{}', unique_key => 'k', failed => ${failed})::text as id`;
    return [id, ...(await all(sql)).map((job) => job.failures)];
  };
  assertEquals(await call(3), ["1", 3]);
  assertEquals(await call(5), ["1", 3]);
});

test("siding.enqueue refuses what enqueue refuses, with the code that docs/adopt.md has", async (sql) => {
  await queue.setQueue(sql, "small", { max_waiting: 1, claim: "lock" });
  await queue.setQueue(sql, "counted", { max_per_owner: 1 });
  await sql`select siding.enqueue('a', '{}', queue => 'small')`;
  const long = (n: number) => `repeat('x', ${n})`;
  const wrong: [string, string, string][] = [
    ["'a', '{}', price => 1, owner => 'bob'", "SD402", 'owner "bob" has no account'],
    ["'a', '{}', queue => 'nowhere'", "SD404", 'queue "nowhere" does not exist'],
    ["'a', '{}', files => '{77}'", "SD410", "a file of this job does not exist"],
    ["'a', '{}', queue => 'small'", "SD429", 'queue "small" is full'],
    ["null, '{}'", "SD422", "kind is missing"],
    ["'A b', '{}'", "SD422", 'kind is "A b": it must be 1 to 63 of'],
    ["'a', '{}', owner => ''", "SD422", "owner is not 1 to 200"],
    [`'a', '{}', unique_key => ${long(201)}`, "SD422", "unique_key is not 1 to 200"],
    ["'a', '{}', price => 2", "SD422", "price is 2 and owner is missing"],
    ["'a', '{}', price => 2.5, owner => 'x'", "SD422", "price is 2.5: it must be a whole number"],
    ["'a', '{}', delay_s => -1", "SD422", "delay_s is not from 0"],
    ["'a', '{}', delay_s => 'NaN'", "SD422", "delay_s is not from 0"],
    ["'a', '{}', delay_s => 1, due_at => now()", "SD422", "due_at and delay_s are both given"],
    ["'a', '{}', due_at => 'infinity'", "SD422", "due_at is not an instant"],
    ["'a', '{}', webhook => 'ftp://x'", "SD422", 'webhook is "ftp://x"'],
    [`'a', to_jsonb(${long(1_048_577)})`, "SD422", "payload is larger than 1 MiB"],
    ["'a', '{}', failed => -1", "SD422", "failed is -1"],
    ["'a', '{}', failed => null", "SD422", "failed is null"],
    ["'a', '{'", "22P02", "invalid input syntax for type json"],
    [`'a', '{"x": "\\u0000"}'`, "22P05", "unsupported Unicode escape sequence"],
    ["'a', '{}', due_at => 'noon-ish'", "22007", "noon-ish"],
    [
      `'a', (${long(100_000).replace("'x'", "'['")} || ${
        long(100_000).replace("'x'", "']'")
      })::jsonb`,
      "54001",
      "stack depth",
    ],
    ["'a', '{}', priority => 3000000000", "42883", "priority => bigint"],
  ];
  const page = doc("adopt");
  for (const [args, code, message] of wrong) {
    const error = await sql.unsafe(`select siding.enqueue(${args})`).then(() => null, (e) => e);
    assertEquals(codeOf(error), code, `${args}: ${error}`);
    assertStringIncludes(error.message, message);
    assert(
      page.includes(`\`${code}\``) || code.startsWith("22"),
      `${code} is not in docs/adopt.md`,
    );
  }
  const error = await sql.begin(
    "isolation level repeatable read",
    (tx) => tx`select siding.enqueue('a', '{}', queue => 'counted', owner => 'x')`,
  ).catch((e) => e);
  assertEquals(codeOf(error), "SD409");
  assertEquals((await all(sql)).length, 1);
});

test("docs/adopt.md: with its grants another role enqueues, pays and cancels", async (sql) => {
  const role = `app_${crypto.randomUUID().slice(0, 8)}`;
  const [grants] = blocks("adopt", "sql app");
  await sql.unsafe(`create role ${role}`);
  try {
    await deposit(sql, "ada", 10);
    await queue.setQueue(sql, "default", {
      max_per_owner: 5,
      max_waiting: 100,
      claim: "lock",
      fair: true,
    });
    const file = await writeFile(via(sql), "a", stream("a"), 10);
    await sql.unsafe(grants.replaceAll(/\bapp\b/g, role)).simple();
    await sql.begin(async (tx) => {
      await tx.unsafe(`set local role ${role}`);
      const [{ id }] =
        await tx`select siding.enqueue('words', '{}', owner => 'ada', price => 4, unique_key => 'k',
        files => array[${file.id}::bigint], failed => 1) as id`;
      const [{ status }] = await tx`select status from siding.jobs where id = ${id}`;
      assertEquals(status, "queued");
      const [{ cancelled }] = await tx`select siding.cancel(${id}) as cancelled`;
      assertEquals(cancelled, "cancelled");
    });
  } finally {
    await sql.unsafe(`drop owned by ${role}; drop role ${role}`).simple();
  }
});

testWith(
  python,
  "python3",
  "a job in Python: a text in, its counts out; what it cannot use fails for good",
  async (sql) => {
    const put = async (name: string, content: string | Uint8Array<ArrayBuffer>) =>
      (await writeFile(
        via(sql),
        name,
        new Blob([content]).stream() as ReadableStream<Uint8Array>,
        1e6,
      )).id;
    const files = [
      await put("a.txt", "One two. Two,\nthree: TWO!\n"),
      await put("b.txt", "Ärger «one»"),
    ];
    const { id } = await enqueue(sql, "words", { top: 2 }, { files });
    await enqueue(sql, "words", {});
    await enqueue(sql, "words", {}, {
      files: [await put("b.wav", new Uint8Array([65, 10, 255, 254]))],
    });
    await queue.enqueue(sql, [{ kind: "words", payload: { top: "many" } }]);
    await drainForTest(sql);
    const [counted, ...failed] = await all(sql);
    assertEquals([counted.status, counted.error, counted.stage], ["done", null, null]);
    assertEquals(counted.result, { words: 7, different: 4, top: { two: 3, one: 2 } });
    const [csv, ...more] = await outputsOf(via(sql), id);
    assertEquals([csv.name, more], ["words.csv", []]);
    assertEquals(
      await new Response(readFile(via(sql), csv)).text(),
      "word,count\r\ntwo,3\r\none,2\r\nthree,1\r\närger,1\r\n",
    );
    assertEquals(failed.map(({ status, failures, error }) => [status, failures, error]), [
      ["failed", 1, "words takes at least one text file; this job has none"],
      ["failed", 1, "b.wav: line 2 is not UTF-8"],
      [
        "failed",
        1,
        "its payload does not fit its kind: payload.top: Invalid input: expected number, received string",
      ],
    ]);
  },
);

testWith(
  python,
  "python3",
  "a job in Python that is asked to stop amid its work ends in order, and at once",
  async () => {
    const cwd = await Deno.makeTempDir({ prefix: "siding-adopt-" });
    try {
      // A file that does not end, so that it is amid its work for certain.
      assert(await works("mkfifo", `${cwd}/slow.txt`));
      const [command, ...args] = kinds.words.command;
      const child = new Deno.Command(command, {
        args,
        cwd,
        stdin: "piped",
        stdout: "piped",
        stderr: "piped",
      }).spawn();
      const writer = child.stdin.getWriter();
      const file = { name: "slow.txt", path: "slow.txt", bytes: 100 };
      await writer.write(new TextEncoder().encode(JSON.stringify({ payload: {}, files: [file] })));
      await writer.close();
      using slow = await Deno.open(`${cwd}/slow.txt`, { write: true }); // once it is read
      await slow.write(new TextEncoder().encode("one\n"));
      child.kill("SIGTERM");
      const { code, stdout, stderr } = await child.output();
      const decoder = new TextDecoder();
      assertEquals([code, decoder.decode(stderr)], [1, "stopped\n"]);
      assertEquals(decoder.decode(stdout), '{"stage": "count", "progress": 0}\n');
    } finally {
      await Deno.remove(cwd, { recursive: true });
    }
  },
);

test("a job in shell: files in, the same compressed and their sums out; it is put off, or fails", async (sql) => {
  const texts = ["one", "two words", ""];
  const names = ["a b.txt", `it's "odd".txt`, "a b.txt"];
  const files = [];
  for (const [n, name] of names.entries()) {
    files.push((await writeFile(via(sql), name, stream(texts[n]), 1e6)).id);
  }
  const { id } = await enqueue(sql, "pack", {}, { files });
  await enqueue(sql, "pack", {});
  await drainForTest(sql);
  const [packed, empty] = await all(sql);
  const sums = await Promise.all(
    texts.map(async (text) =>
      new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text))).toHex()
    ),
  );
  assertEquals([packed.status, packed.result], ["done", { sha256: sums }]);
  const outputs = await outputsOf(via(sql), id);
  assertEquals(outputs.map(({ name }) => name).sort(), names.map((name) => `${name}.gz`).sort());
  const unpacked = await Promise.all(
    outputs.map((file) =>
      new Response(
        readFile(via(sql), file).pipeThrough(new DecompressionStream("gzip") as TransformStream),
      ).text()
    ),
  );
  assertEquals(unpacked.sort(), texts.toSorted());
  assertEquals([empty.status, empty.error], [
    "failed",
    "pack takes at least one file; this job has none",
  ]);

  const full = typed({ pack: process({ ...kinds.pack, env: { MIN_FREE_KB: "999999999999" } }) });
  await full.enqueue(sql, "pack", {}, { files });
  const [{ outcome }] = await full.drainForTest(sql);
  assertEquals([outcome?.outcome, (await all(sql))[2].snoozes], ["snoozed", 1]);
});

testWith(python, "python3", "docs/jobs.md: its Python and its shell commands run", async () => {
  const [block] = blocks("jobs", "python");
  assertEquals(
    (await run(["python3", "-c", block], '{"payload": {}, "files": [1, 2]}')).out.split("\n"),
    [
      '{"stage": "count", "progress": 0.5}',
      '{"result": {"files": 2}}',
      "",
    ],
  );
  const cwd = await Deno.makeTempDir({ prefix: "siding-adopt-" });
  try {
    await Deno.symlink(`${root}jobs`, `${cwd}/jobs`);
    const [commands] = blocks("jobs", "sh");
    const { code, out, err } = await run(["/bin/sh", "-eu"], commands, { cwd });
    assertEquals(code, 0, err);
    assertStringIncludes(
      out,
      '{"result": {"words": 3, "different": 2, "top": {"two": 2, "one": 1}}}\n',
    );
  } finally {
    await Deno.remove(cwd, { recursive: true });
  }
});

test("docs/jobs.md: the test that it shows passes", async (_, url) => {
  const code = blocks("jobs", "ts").find((block) => block.includes("drainForTest"))!
    .replaceAll('"../', `"${new URL("../", import.meta.url)}`);
  const { withoutFile } = await import(`data:application/typescript,${encodeURIComponent(code)}`);
  await withoutFile(url);
});

Deno.test("in a schema of another name all of it works, and nothing is outside it", async () => {
  await using database = await emptyDatabase();
  const { url } = database;
  const env = { SIDING_SCHEMA: "our_jobs" };
  const sql = connect(url, { max: 2 });
  try {
    const migrated = await runScript("migrate.ts", [], { DATABASE_URL: url, ...env });
    assertEquals(migrated.code, 0, migrated.stderr);
    await using worker = startWorker(url, [], [], env);
    await using site = await startSite(url, [], env);
    await sql`select our_jobs.enqueue('echo', '1', unique_key => 'k')`;
    await sql`select our_jobs.enqueue('fails', '1')`;
    const ended = () =>
      sql`select from our_jobs.jobs where status in ('done', 'scheduled') and attempt = 1`;
    await waitFor(
      async () => (await ended()).length === 2,
      `both jobs to have run: ${worker.log()}`,
    );

    const tools: [string, ...string[]][] = [
      ["tools/doctor.ts", "--watch-s", "1"],
      ["tools/stats.ts"],
      ["tools/key.ts", "create", "ada"],
      ["recover.ts", "list"],
    ];
    const ran = await Promise.all(
      tools.map(([tool, ...args]) => runScript(tool, args, { DATABASE_URL: url, ...env })),
    );
    for (const [n, { code, stderr }] of ran.entries()) {
      assertEquals(code, 0, `${tools[n]}: ${stderr}`);
    }
    const headers = { authorization: `Bearer ${site.adminToken}` };
    for (const path of ["/api/jobs", "/health", "/"]) {
      const reply = await fetch(site.address + path, { headers });
      assertEquals(reply.status, 200, `${path}: ${await reply.text()}`);
    }
    const elsewhere = await sql`
      select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
      where n.nspname !~ '^(pg_|information_schema$|our_jobs$)'`;
    assertEquals([...elsewhere], []);
  } finally {
    await sql.end();
  }
});
