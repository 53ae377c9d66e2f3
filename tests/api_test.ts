/** The API of the site, driven by a client that knows its OpenAPI document alone. */
import {
  assert,
  assertEquals,
  assertGreater,
  assertMatch,
  assertStringIncludes,
} from "@std/assert";
import { fileURLToPath } from "node:url";
import { deposit } from "../credits.ts";
import { createKey, revokeKey } from "../keys.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { clientOf, formOf } from "./openapi_client.ts";
import { startWorker } from "./processes.ts";
import { count, eventsOf, keyOf, startSite } from "./site.ts";

/** A job whose payload is arrays in arrays. */
const nested = (depth: number) =>
  `{"kind": "echo", "payload": ${"[".repeat(depth)}${"]".repeat(depth)}}`;

test(
  "a recording goes in, is followed by events, and what it became is taken home",
  async (sql, url) => {
    await using site = await startSite(url);
    await using _worker = startWorker(url);
    const api = await clientOf(site, await keyOf(sql, "ada"));
    const bytes = new Uint8Array(3_000_000).map((_, at) => at % 249);
    const form = formOf({ kind: "copy", payload: '{"title": "é"}', delay_s: "0" }, [
      "é.wav",
      bytes,
    ]);
    const { status, body, headers } = await api.call("post", "/jobs", { form });
    assertEquals([status, body.created, headers.get("location")], [
      201,
      true,
      `/api/jobs/${body.id}`,
    ]);

    const stream = await api.call("get", "/jobs/{id}/events", { with: { id: body.id } });
    const states: string[] = [];
    for await (const { event, data } of eventsOf(stream.response)) {
      states.push(event === "job" ? data.status : event);
      if (event === "job") api.assertFits("event", { $ref: "#/components/schemas/JobEvent" }, data);
    }
    assertEquals(states.slice(-2), ["done", "end"]);

    const { body: job } = await api.call("get", "/jobs/{id}", { with: { id: body.id } });
    assertEquals([job.owner, job.status, job.payload, job.result, job.attempt], [
      ...["ada", "done", { title: "é" }, { files: 1 }, 1],
    ]);
    assertEquals([job.inputs[0].name, job.inputs[0].bytes], ["é.wav", bytes.length]);
    for (const file of [...job.inputs, ...job.outputs]) {
      const got = await api.call("get", "/jobs/{id}/files/{file_id}", {
        with: { id: body.id, file_id: file.id },
      });
      assertEquals(new Uint8Array(await got.response.arrayBuffer()), bytes);
      assertEquals(new URL(file.url, site.address).href, got.response.url);
    }
  },
);

test(
  "jobs are listed by filter and page by page; attempts say why they ended",
  async (sql, url) => {
    await using site = await startSite(url);
    const api = await clientOf(site, site.adminToken);
    const jobs = await queue.enqueue(
      sql,
      Array.from({ length: 5 }, () => ({ kind: "echo", owner: "ada" })),
    );
    await queue.enqueue(sql, [{ kind: "number", owner: "bob", payload: 1 }]);
    await using _worker = startWorker(url, ["--kinds", "fails"]);
    const { body: failing } = await api.call("post", "/jobs", { json: { kind: "fails" } });
    await waitFor(async () => {
      const { body } = await api.call("get", "/jobs/{id}", { with: { id: failing.id } });
      return body.attempts[0]?.outcome === "failed" && body.attempts[0].error.includes("as always");
    }, "the attempt to be listed");

    const ids: string[] = [];
    for (let cursor: string | undefined, pages = 1;; pages++) {
      const { body } = await api.call("get", "/jobs", { with: { kind: "echo", limit: 2, cursor } });
      ids.push(...body.items.map((job: queue.JobView) => job.id));
      if (body.next_cursor === null) {
        assertEquals(pages, 3);
        break;
      }
      cursor = body.next_cursor;
    }
    assertEquals(ids, jobs.map(({ id }) => id).reverse());
    const only = async (filter: Record<string, string>) =>
      (await api.call("get", "/jobs", { with: filter })).body.items.map((job: queue.JobView) =>
        job.kind
      );
    assertEquals(await only({ owner: "bob" }), ["number"]);
    assertEquals(await only({ status: "queued", kind: "number" }), ["number"]);
    assertEquals(await only({ queue: "elsewhere" }), []);

    const { body: queues } = await api.call("get", "/queues");
    assertEquals(queues.items[0].queued, 6);
    const { body: workers } = await api.call("get", "/workers");
    assertEquals(workers.items.map((w: { state: string }) => w.state), ["idle"]);
  },
);

test("an owner's jobs are that owner's alone: to others they are not there", async (sql, url) => {
  await using site = await startSite(url);
  const ada = await clientOf(site, await keyOf(sql, "ada"));
  const bob = ada.as(await keyOf(sql, "bob"));
  const { body: { id } } = await ada.call("post", "/jobs", {
    form: formOf({ kind: "echo", unique_key: "mine" }, ["a.txt", "hers"]),
  });
  const file_id = (await ada.call("get", "/jobs/{id}", { with: { id } })).body.inputs[0].id;
  for (const path of Object.keys(ada.paths).filter((path) => path.includes("{id}"))) {
    const method = path.endsWith("cancel") ? "post" : "get";
    const { status, body } = await bob.call(method, path, { with: { id, file_id } });
    assertEquals([path, status, body.detail], [path, 404, `there is no job ${id}`]);
    assertEquals((await ada.as(null).call(method, path, { with: { id, file_id } })).status, 401);
  }
  assertEquals((await bob.call("get", "/jobs")).body.items, []);
  assertEquals((await bob.call("get", "/workers")).status, 404);
  const { body } = await bob.call("get", "/jobs", { with: { owner: "ada" } });
  assertEquals(body.errors, [{ field: "owner", value: "ada", rule: "only the admin may give it" }]);
  // The same unique key is another job of another owner's.
  const his = await bob.call("post", "/jobs", { json: { kind: "echo", unique_key: "mine" } });
  assertEquals([his.status, his.body.created], [201, true]);
  const hers = await ada.call("post", "/jobs", { json: { kind: "echo", unique_key: "mine" } });
  assertEquals([hers.status, hers.body], [200, { id, created: false, replayed: false }]);
  assertEquals(
    (await ada.call("post", "/jobs/{id}/cancel", { with: { id } })).body.status,
    "cancelled",
  );
});

test("a key that is revoked is refused at once", async (sql, url) => {
  await using site = await startSite(url);
  const { id, key } = await createKey(sql, "ada");
  const api = await clientOf(site, key);
  assertEquals((await api.call("get", "/jobs")).status, 200);
  await revokeKey(sql, id);
  assertEquals((await api.call("get", "/jobs")).status, 401);
  for (const odd of ["", "x", `siding_${id}_${"A".repeat(43)}`, `${key}x`]) {
    assertEquals((await api.as(odd).call("get", "/jobs")).status, 401, odd);
  }
});

test(
  "a submission with an Idempotency-Key happens once, however often and at once it comes",
  async (sql, url) => {
    await using site = await startSite(url);
    const api = await clientOf(site, await keyOf(sql, "ada"));
    const submit = (content: string) =>
      api.call("post", "/jobs", {
        form: formOf({ kind: "echo" }, ["a.txt", content]),
        with: { "idempotency-key": "k" },
      });
    const replies = await Promise.all(Array.from({ length: 8 }, () => submit("same")));
    const [first] = replies;
    assertEquals(replies.map(({ body }) => body.id), replies.map(() => first.body.id));
    assertEquals(replies.map(({ status }) => status).sort(), [
      200,
      200,
      200,
      200,
      200,
      200,
      200,
      201,
    ]);
    assertEquals(replies.filter(({ body }) => body.replayed).length, 7);
    assertEquals([await count(sql, "jobs"), await count(sql, "files")], [1, 1]); // no copies are left
    const { status, body } = await submit("other");
    assertEquals([status, body.errors[0].field], [422, "Idempotency-Key"]);
    const bob = api.as(await keyOf(sql, "bob"));
    const his = await bob.call("post", "/jobs", {
      json: { kind: "echo" },
      with: { "idempotency-key": "k" },
    });
    assertEquals(his.status, 201);
  },
);

test("what is malformed is refused with the field, the value and the rule", async (sql, url) => {
  await using site = await startSite(url, ["--max-file-bytes", "1000000"]);
  const api = await clientOf(site, await keyOf(sql, "ada"));
  const json = (more: Record<string, unknown>) => ({ json: { kind: "echo", ...more } });
  const once = (more: Record<string, unknown>) => ({
    ...json(more),
    with: { "idempotency-key": "once" },
  });
  const type = "multipart/form-data; boundary=b";
  const part = (headers: string) =>
    `--b\r\nContent-Disposition: form-data${headers}\r\n\r\necho\r\n--b--\r\n`;
  const wrong: [Parameters<typeof api.call>[2], number, field: string, value?: unknown][] = [
    [{ json: {} }, 422, "kind"],
    [{ json: [] }, 422, "body"],
    [json({ kind: "sing" }), 422, "kind", "sing"],
    [json({ kind: "number", payload: "x" }), 422, "payload", "x"],
    [json({ kind: "throws", payload: { message: 5 } }), 422, "payload.message", 5],
    [json({ colour: "red" }), 422, "colour"],
    [json({ queue: "No" }), 422, "queue", "No"],
    [json({ queue: "nowhere" }), 422, "queue", "nowhere"],
    [json({ queue: "webhooks" }), 422, "queue", "webhooks"],
    [json({ delay_s: -1 }), 422, "delay_s", -1],
    [json({ due_at: "noon" }), 422, "due_at", "noon"],
    [json({ due_at: "2099-01-01T00:00:00Z", delay_s: 1 }), 422, "due_at"],
    [json({ due_at: "0000-01-01T00:00:00Z" }), 422, "due_at", "0000-01-01T00:00:00Z"],
    [once({ due_at: "0000-01-01T00:00:00Z" }), 422, "due_at", "0000-01-01T00:00:00Z"],
    [once({ due_at: "2099-01-01T00:00:00+23:59" }), 422, "due_at"],
    [once({ queue: "nowhere" }), 422, "queue", "nowhere"],
    [once({ payload: { "a\0": 1 } }), 422, "payload"],
    [json({ priority: 1 }), 422, "priority", 1],
    [json({ owner: "bob" }), 422, "owner", "bob"],
    [json({ unique_key: "" }), 422, "unique_key", ""],
    [json({ webhook: "ftp://x" }), 422, "webhook", "ftp://x"],
    [json({ webhook: "https://x.example" }), 422, "webhook"], // there is no secret to sign with
    [json({ payload: "a\0b" }), 422, "payload"],
    [json({ payload: "x".repeat(1_100_000) }), 422, "payload"],
    [{ ...json({}), with: { "idempotency-key": "k".repeat(201) } }, 422, "Idempotency-Key"],
    [{ odd: { body: nested(50_000), type: "application/json" } }, 422, "payload"],
    [{ odd: { body: nested(500_000), type: "application/json" } }, 422, "payload"],
    [{ odd: { body: "{", type: "application/json" } }, 400, "body"],
    [{ odd: { body: "", type: "application/json" } }, 400, "body"],
    [{ odd: { body: "x", type: "multipart/form-data" } }, 400, "Content-Type"],
    [{ form: formOf({ kind: "echo", payload: "{" }) }, 422, "payload", "{"],
    [{ form: formOf({ kind: "echo", delay_s: "soon" }) }, 422, "delay_s", "soon"],
    [{ odd: { body: part('; name="kind"\r\nContent-Type: a/b; charset=no'), type } }, 422, "kind"],
    [{ odd: { body: part(""), type } }, 422, "form"],
    [{ form: formOf({ kind: "echo", csrf: "x" }) }, 422, "csrf"],
    [{ form: formOf({}, ["a", "x"]) }, 422, "kind"],
    [
      {
        form: formOf(
          { kind: "echo" },
          ...Array.from({ length: 21 }, () => ["a", "x"] as [string, string]),
        ),
      },
      ...[422, "file"] as const,
    ],
  ];
  for (const [request, status, field, value] of wrong) {
    const { status: got, body } = await api.call("post", "/jobs", request);
    const shown = JSON.stringify(body);
    assertEquals([got, body.errors?.[0].field], [status, field], shown);
    if (value !== undefined) assertEquals(body.errors[0].value, value);
    assert(body.errors[0].rule.length > 3 && body.detail.includes(body.errors[0].rule), shown);
  }
  const form = formOf({ kind: "echo" });
  form.append("photo", new Blob(["x"]), "x.png");
  assertEquals((await api.call("post", "/jobs", { form })).body.errors[0].field, "photo");
  const twice = formOf({ kind: "echo" });
  twice.append("kind", "number");
  assertEquals((await api.call("post", "/jobs", { form: twice })).body.errors[0].field, "kind");
  const filters = { status: "lost", kind: "K", limit: "0", cursor: "x", owner: "", colour: "red" };
  for (const [name, value] of Object.entries(filters)) {
    const { status, body } = await api.call("get", "/jobs", { with: { [name]: value } });
    assertEquals([status, body.errors?.[0].field], [422, name], JSON.stringify(body));
  }
  assertEquals(
    [await count(sql, "jobs"), await count(sql, "files")],
    [0, 0],
    "nothing is left of them",
  );
});

test("over a limit the answer says which, and when to come back", async (sql, url) => {
  await using site = await startSite(url, ["--submits-per-minute", "5"]);
  const api = await clientOf(site, await keyOf(sql, "ada"));
  await queue.setQueue(sql, "small", { max_waiting: 1 });
  await queue.setQueue(sql, "fair", { max_per_owner: 1 });
  const submit = (json: Record<string, unknown>) =>
    api.call("post", "/jobs", { json: { kind: "echo", ...json } });
  await queue.enqueue(sql, [{ kind: "echo", queue: "small" }, {
    kind: "echo",
    queue: "fair",
    owner: "ada",
  }]);
  const replies = [
    await submit({ queue: "small" }),
    await submit({ queue: "fair" }),
    await submit({ kind: "priced" }),
  ];
  const once = { json: { kind: "echo", queue: "small" }, with: { "idempotency-key": "once" } };
  const full = await api.call("post", "/jobs", once);
  assertEquals([full.status, full.headers.get("retry-after")], [429, "30"]);
  assertEquals(
    replies.map(({ status, body, headers }) => [status, body.detail, headers.get("retry-after")]),
    [
      [429, 'queue "small" is full: its max_waiting is 1', "30"],
      [
        429,
        'owner "ada" would have 2 unfinished jobs in queue "fair": its max_per_owner is 1',
        "30",
      ],
      [402, replies[2].body.detail, null],
    ],
  );
  assertStringIncludes(replies[2].body.detail, 'owner "ada" has no account');
  await deposit(sql, "ada", 5);
  assertEquals((await submit({ kind: "priced" })).status, 201);
  const { status, body, headers } = await submit({});
  assertEquals([status, body.detail], [429, "submitted jobs: more than 5 in 60 s"]);
  assert(Number(headers.get("retry-after")) > 0 && Number(headers.get("retry-after")) <= 60);
  const bob = api.as(await keyOf(sql, "bob"));
  assertEquals((await bob.call("post", "/jobs", { json: { kind: "echo" } })).status, 201);
});

test(
  "a job is cancelled where it waits and where it runs, and not once it has ended",
  async (sql, url) => {
    await using site = await startSite(url);
    const api = await clientOf(site, await keyOf(sql, "ada"));
    const submitted = async (kind: string) =>
      (await api.call("post", "/jobs", { json: { kind } })).body.id as string;
    const cancel = (id: string) => api.call("post", "/jobs/{id}/cancel", { with: { id } });
    const status = async (id: string) =>
      (await api.call("get", "/jobs/{id}", { with: { id } })).body.status;
    const waiting = await submitted("echo");
    assertEquals((await cancel(waiting)).body, { id: waiting, status: "cancelled" });
    assertEquals((await cancel(waiting)).status, 200); // it is so already
    await using _worker = startWorker(url);
    const running = await submitted("waits");
    await waitFor(async () => await status(running) === "running", "the job to run");
    const { status: code, body } = await cancel(running);
    assertEquals([code, body.status], [202, "running"]);
    await waitFor(async () => await status(running) === "cancelled", "its worker to end it");
    const done = await submitted("echo");
    await waitFor(async () => await status(done) === "done", "the job to be done");
    const late = await cancel(done);
    assertEquals([late.status, late.body.detail], [
      409,
      `job ${done} is done: only an unfinished job can be cancelled`,
    ]);
  },
);

test(
  "the document and its page are for everybody, the rest under /api for those with a key",
  async (_, url) => {
    await using site = await startSite(url);
    const page = await site.ask("/api", { token: null });
    const text = await page.text();
    assertEquals([page.status, page.headers.get("content-type")], [
      200,
      "text/html; charset=UTF-8",
    ]);
    assert(!/<script(?! src)|<style|style=|onclick/.test(text), "nothing inline");
    const api = await clientOf(site, null);
    assertGreater(Object.keys(api.paths).length, 5);
    for (const path of Object.keys(api.paths)) assertStringIncludes(text, `/api${path}`);
    for (const path of ["/api/jobs", "/api/queues", "/api/nothing", "/mcp"]) {
      const reply = await site.ask(path, { token: null });
      assertEquals([path, reply.status, reply.headers.get("content-type")], [
        ...[path, 401, "application/problem+json"],
      ]);
      await reply.body!.cancel();
    }
    const nowhere = await site.ask("/api/nothing");
    assertEquals([nowhere.status, (await nowhere.json()).detail], [
      404,
      "there is nothing at /api/nothing",
    ]);
  },
);

test("the README's commands do what they say", async (_, url) => {
  const root = fileURLToPath(new URL("../", import.meta.url));
  const jobs = `${root}jobs.ts`;
  await using site = await startSite(url, ["--jobs", jobs]);
  await using _worker = startWorker(url, ["--jobs", jobs]);
  const readme = await Deno.readTextFile(`${root}README.md`);
  const block = readme.split("```sh\n").map((rest) => rest.split("```")[0])
    .find((block) => block.includes("/api/jobs"))!;
  const commands = block.split("\n").filter((line) => !/^export|^deno task web/.test(line)).join(
    "\n",
  )
    .replaceAll("http://localhost:8000", site.address)
    .replaceAll("@examples/", `@${root}examples/`)
    .replaceAll("deno task", `deno task --config ${root}deno.json`);
  const folder = await Deno.makeTempDir();
  try {
    const { code, stdout, stderr } = await new Deno.Command("bash", {
      args: ["-euc", commands],
      cwd: folder,
      env: { DATABASE_URL: url, NO_COLOR: "1" },
    }).output();
    const [out, errors] = [stdout, stderr].map((bytes) => new TextDecoder().decode(bytes));
    assertEquals(code, 0, errors);
    for (const part of ['{"id":"1","created":true', "event: end", '"note_count"', "409"]) {
      assertStringIncludes(out, part);
    }
    assertMatch(await Deno.readTextFile(`${folder}/score.abc`), /^X:1\nT:Stairs$/m);
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
});
