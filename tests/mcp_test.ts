/** The MCP endpoint, by the protocol's own client. */
import { assert, assertEquals, assertRejects, assertStringIncludes } from "@std/assert";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { via } from "../db.ts";
import { outputsOf, readFile } from "../files.ts";
import { createKey, revokeKey } from "../keys.ts";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { startWorker } from "./processes.ts";
import { keyOf, type RunningSite, startSite } from "./site.ts";

interface Agent extends AsyncDisposable {
  client: Client;
  /** Calls a tool. @returns what it answered, and whether that is an error */
  // deno-lint-ignore no-explicit-any -- whatever JSON the test expects
  call(name: string, input?: Record<string, unknown>): Promise<{ error: boolean; answer: any }>;
}

async function agent(site: RunningSite, token: string): Promise<Agent> {
  const client = new Client({ name: "test", version: "1" });
  await client.connect(
    new StreamableHTTPClientTransport(new URL("/mcp", site.address), {
      requestInit: { headers: { authorization: `Bearer ${token}` } },
    }),
  );
  return {
    client,
    async call(name, input = {}) {
      const reply = await client.callTool({ name, arguments: input });
      const [{ text }] = reply.content as { text: string }[];
      const error = reply.isError === true;
      return { error, answer: error ? text : JSON.parse(text) };
    },
    async [Symbol.asyncDispose]() {
      await client.close();
    },
  };
}

test(
  "an agent submits a job with a file, follows it and learns where its output is",
  async (sql, url) => {
    await using site = await startSite(url);
    await using _worker = startWorker(url);
    await using ada = await agent(site, await keyOf(sql, "ada"));
    const { tools } = await ada.client.listTools();
    assertEquals(tools.map(({ name }: { name: string }) => name), [
      ...["submit_job", "get_job", "list_jobs", "cancel_job", "queue_status"],
    ]);
    const { kind } = tools[0].inputSchema.properties as { kind: { enum: string[] } };
    assert(kind.enum.includes("copy"), "the kinds there are");

    const base64 = new TextEncoder().encode("a recording").toBase64();
    const { answer } = await ada.call("submit_job", {
      kind: "copy",
      files: [{ name: "in.txt", base64 }],
      idempotency_key: "once",
    });
    assertEquals([answer.created, answer.replayed], [true, false]);
    const job = await waitFor(async () => {
      const { answer: job } = await ada.call("get_job", { id: answer.id });
      return job.status === "done" && job;
    }, "the job to be done");
    assertEquals(job.inputs[0].name, "in.txt");
    const [file] = await outputsOf(via(sql), answer.id);
    assertEquals(job.outputs[0].url, `/api/jobs/${answer.id}/files/${file.id}`);
    assertEquals(await new Response(readFile(via(sql), file)).text(), "a recording");

    const again = await ada.call("submit_job", {
      kind: "copy",
      files: [{ name: "in.txt", base64 }],
      idempotency_key: "once",
    });
    assertEquals(again.answer, { id: answer.id, created: false, replayed: true });
    const { answer: page } = await ada.call("list_jobs", { status: "done", limit: 5 });
    assertEquals([page.items.length, page.items[0].id, page.next_cursor], [1, answer.id, null]);
  },
);

test(
  "an agent sees and cancels its owner's jobs only, within the limits of its key",
  async (sql, url) => {
    await using site = await startSite(url, ["--submits-per-minute", "2"]);
    const [{ id }] = await queue.enqueue(sql, [{ kind: "echo", owner: "ada" }]);
    await queue.setQueue(sql, "full", { max_per_owner: 1 });
    const bobs = await createKey(sql, "bob");
    await using bob = await agent(site, bobs.key);
    for (const tool of ["get_job", "cancel_job"]) {
      assertEquals(await bob.call(tool, { id }), { error: true, answer: `there is no job ${id}` });
    }
    assertEquals((await bob.call("list_jobs")).answer.items, []);
    const own = await bob.call("submit_job", { kind: "echo", queue: "full" });
    assertEquals((await bob.call("cancel_job", { id: own.answer.id })).answer.status, "cancelled");
    const late = await bob.call("cancel_job", { id: own.answer.id });
    assertEquals(late.answer.status, "cancelled"); // it is so already
    await bob.call("submit_job", { kind: "echo" });
    const many = await bob.call("submit_job", { kind: "echo" });
    assert(many.error);
    assertStringIncludes(many.answer, "submitted jobs: more than 2 in 60 s; come back in");
    const { answer: { items } } = await bob.call("queue_status");
    assertEquals(items.find((q: { name: string }) => q.name === "default").queued, 2);

    await revokeKey(sql, bobs.id);
    await assertRejects(() => bob.call("list_jobs"), Error, "401");
    await assertRejects(() => agent(site, "siding_1_none"), Error, "401");
  },
);

test("a tool's errors name the field and the rule, as the API's do", async (_, url) => {
  await using site = await startSite(url);
  await using admin = await agent(site, site.adminToken);
  const wrong: [string, Record<string, unknown>, string][] = [
    ["submit_job", {}, "kind: "],
    ["submit_job", { kind: "sing" }, "kind: it must be one of "],
    ["submit_job", { kind: "number", payload: "x" }, "payload: "],
    ["submit_job", { kind: "echo", colour: 1 }, "colour: there is no such field"],
    ["submit_job", { kind: "echo", idempotency_key: "a\0" }, "Idempotency-Key: it contains a NUL"],
    ["submit_job", { kind: "echo", queue: "nowhere" }, "queue: "],
    ["submit_job", { kind: "echo", files: [{ name: "a", base64: "*" }] }, "files.0.base64: "],
    ["list_jobs", { limit: 1000 }, "limit: "],
    ["list_jobs", { cursor: "x" }, "cursor: "],
    ["get_job", {}, "id: "],
    ["get_job", { id: "x" }, "there is no job x"],
    ["queue_status", { name: "x" }, "name: there is no such field"],
  ];
  for (const [tool, input, message] of wrong) {
    const { error, answer } = await admin.call(tool, input);
    assert(error && answer.includes(message), `${tool} ${JSON.stringify(input)}: ${answer}`);
  }
  await assertRejects(() => admin.call("drop_table"), Error, "there is no tool drop_table");
  const body = JSON.stringify([{ jsonrpc: "2.0", id: 1, method: "tools/list" }]);
  const headers = {
    "content-type": "application/json",
    accept: "application/json, text/event-stream",
  };
  const batch = await site.ask("/mcp", { method: "POST", headers, body });
  assertEquals([batch.status, (await batch.json()).detail], [
    400,
    "/mcp takes one message at a time",
  ]);
  const get = await site.ask("/mcp");
  assertEquals([get.status, (await get.json()).detail], [405, "/mcp takes POST alone"]);
});
