/** Event streams and downloads of the site, which runs as a process of its own. */
import { assert, assertEquals, assertMatch, assertNotEquals, assertThrows } from "@std/assert";

import { type Pool, type Via, via } from "../db.ts";
import { writeFile } from "../files.ts";
import { createKey, revokeKey } from "../keys.ts";
import * as processes from "../processes.ts";
import * as claims from "../claims.ts";
import * as queue from "../queue.ts";
import { Watch } from "../web/events.ts";
import { Problem } from "../web/problem.ts";
import { databaseTest, waitFor } from "./database.ts";
import { eventsOf, keyOf, type SentEvent, startSite } from "./site.ts";

const kinds = ["echo"];
const aWorker = (sql: Pool) =>
  processes.register(sql, { role: "worker", name: "w", version: "t", kinds, knownKinds: kinds });

/** Claims the next job, by hand. */
async function claimNext(sql: Pool) {
  const worker = await aWorker(sql);
  const { ready } = await claims.look(sql, null, kinds);
  const options = { worker, kinds, most: 1, leaseS: 60, token: crypto.randomUUID() };
  const [job] = await claims.claim(sql, ready[0], options);
  return { worker, job };
}

const test = databaseTest;

test("an event stream tells each change of a job, and ends with it", async (sql, url) => {
  await using site = await startSite(url);
  const token = await keyOf(sql, "ada");
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", owner: "ada" }]);
  const reply = await site.ask(`/api/jobs/${id}/events`, { token });
  assertEquals([reply.status, reply.headers.get("content-type")], [200, "text/event-stream"]);
  const events = eventsOf(reply);
  const next = async () => (await events.next()).value as SentEvent;
  assertEquals((await next()).data.status, "queued");
  const { worker, job } = await claimNext(sql);
  assertEquals((await next()).data.status, "running");
  const beat = { id, attempt: 1, stage: "pitch", progress: 0.5 };
  await queue.heartbeat(sql, worker, [beat], 60, 45);
  const { data } = await next();
  assertEquals([data.stage, data.progress, data.attempt], ["pitch", 0.5, 1]);
  await queue.finish(sql, worker, job, { secret: "the result is not in the event" });
  const done = await next();
  assertEquals([done.event, done.data.status, "result" in done.data], ["job", "done", false]);
  assertEquals([(await next()).event, (await events.next()).done], ["end", true]);
});

test(
  "a client that comes back with Last-Event-ID is told only what it does not know",
  async (sql, url) => {
    await using site = await startSite(url);
    const [{ id }] = await queue.enqueue(sql, [{ kind: "echo" }]);
    const follow = async (last?: string) => {
      const leave = new AbortController();
      const headers: Record<string, string> = last ? { "last-event-id": last } : {};
      const reply = await site.ask(`/api/jobs/${id}/events`, { headers, signal: leave.signal });
      const events = reply.body ? eventsOf(reply) : undefined;
      return { reply, leave, next: async () => (await events!.next()).value as SentEvent };
    };
    const first = await follow();
    const queued = await first.next();
    first.leave.abort();

    const second = await follow(queued.id);
    const { worker, job } = await claimNext(sql);
    const running = await second.next(); // and not `queued` again
    assertEquals(running.data.status, "running");
    assertNotEquals(running.id, queued.id);
    second.leave.abort();
    await queue.finish(sql, worker, job, 1); // while nobody looks on

    const third = await follow(running.id);
    const done = await third.next();
    assertEquals([done.data.status, (await third.next()).event], ["done", "end"]);
    await third.reply.body?.cancel().catch(() => {});
    const fourth = await follow(done.id);
    assertEquals(fourth.reply.status, 204);
  },
);

test("a revoked key's stream ends, and so do all when the site stops", async (sql, url) => {
  await using site = await startSite(url);
  const { id: keyId, key } = await createKey(sql, "ada");
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", owner: "ada" }]);
  const hers = eventsOf(await site.ask(`/api/jobs/${id}/events`, { token: key }));
  const admins = eventsOf(await site.ask(`/api/jobs/${id}/events`));
  await hers.next();
  await admins.next();
  await revokeKey(sql, keyId);
  assertEquals((await hers.next()).value, { event: "end", data: { status: null } });
  assertEquals((await hers.next()).done, true);
  site.kill("SIGTERM");
  assertEquals((await admins.next()).done, true);
  assertEquals(await site.ended, 0, site.log());
});

test("another owner's job, its file and its stream are not found", async (sql, url) => {
  await using site = await startSite(url);
  const file = await writeFile(via(sql), "a.wav", new Blob(["hi"]).stream(), 100);
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", owner: "ada", files: [file.id] }]);
  const [ada, bob] = [await keyOf(sql, "ada"), await keyOf(sql, "bob")];
  const paths = [`/api/jobs/${id}/events`, `/api/jobs/${id}/files/${file.id}`];
  for (const path of paths) {
    const hers = await site.ask(path, { token: ada });
    assertEquals(hers.status, 200);
    await hers.body!.cancel();
    const his = await site.ask(path, { token: bob });
    assertEquals([his.status, (await his.json()).detail], [404, `there is no job ${id}`]);
    const nobodys = await site.ask(path, { token: null });
    assertEquals([nobodys.status, nobodys.headers.get("www-authenticate")], [401, "Bearer"]);
    await nobodys.body!.cancel();
  }
  for (const odd of ["0", "x", "99999999999999999999", "9223372036854775808", "1%00", "-1"]) {
    const reply = await site.ask(`/api/jobs/${odd}/events`);
    assertEquals(reply.status, 404, odd);
    await reply.body!.cancel();
  }
});

test("a download is an attachment, whatever it was said to be", async (sql, url) => {
  await using site = await startSite(url);
  const bytes = new Uint8Array(2_500_000).map((_, at) => at % 251);
  const names = ['ev"il\\..\r\n<b>é%;.svg', "page.html", "tune.abc", "noise.bin"];
  const files = [];
  for (const name of names) {
    files.push(await writeFile(via(sql), name, new Blob([bytes]).stream(), 1e9));
  }
  const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", files: files.map((f) => f.id) }]);
  const types = [];
  for (const file of files) {
    const reply = await site.ask(`/api/jobs/${id}/files/${file.id}`);
    assertEquals(new Uint8Array(await reply.arrayBuffer()), bytes);
    const header = (name: string) => reply.headers.get(name)!;
    assertEquals([header("content-length"), header("x-content-type-options")], [
      String(bytes.length),
      "nosniff",
    ]);
    assertMatch(
      header("content-disposition"),
      /^attachment; filename="[^"\\]*"; filename\*=UTF-8''[\w.%~!-]+$/,
    );
    assert(header("content-security-policy").includes("default-src 'none'"));
    types.push(header("content-type"));
  }
  const opaque = "application/octet-stream";
  assertEquals(types, [opaque, opaque, "text/vnd.abc", opaque]);
  const other = await site.ask(`/api/jobs/${id}/files/999`);
  assertEquals([other.status, (await other.json()).detail], [404, `job ${id} has no file 999`]);
});

test("one statement at a time serves all who look on, and none is sent once nobody does", async (sql) => {
  const jobs = await queue.enqueue(sql, Array.from({ length: 60 }, () => ({ kind: "echo" })));
  let statements = 0;
  const db: Via = { run: (f) => (statements++, f(sql)) };
  const watch = new Watch({ db, stopping: new AbortController().signal }, 20);
  const told = jobs.map(() => 0);
  const leave = jobs.map(({ id }, at) =>
    watch.add(id, { keyId: null, owner: "ada", tell: () => void told[at]++ })
  );
  await waitFor(() => told.every((times) => times >= 3), "all to be told three times");
  assert(
    new Set(told).size === 1 && statements - told[0] <= 1,
    `${statements} for ${told[0]} times`,
  );
  leave.slice(0, 59).forEach((f) => f());
  assert(watch.polling);
  leave[59]();
  await waitFor(() => !watch.polling, "the poller to end");
  // One owner cannot take all the streams there may be.
  const many = Array.from(
    { length: 250 },
    () => watch.add("1", { keyId: null, owner: "ada", tell() {} }),
  );
  assertThrows(() => watch.assertRoom("ada"), Problem, "event streams: more than 250 at a time");
  watch.assertRoom("bob");
  many.push(
    ...Array.from(
      { length: 750 },
      (_, at) => watch.add("1", { keyId: null, owner: `owner ${at}`, tell() {} }),
    ),
  );
  assertThrows(() => watch.assertRoom(null), Problem, "1000 event streams are open");
  many.forEach((f) => f());
  watch.assertRoom("ada");
  await waitFor(() => !watch.polling, "the poller to end");
});
