/** Traces, as a collector gets them from a site and a worker by Deno's own support. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import * as queue from "../queue.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { startWorker } from "./processes.ts";
import { startSite } from "./site.ts";

interface Span {
  traceId: string;
  spanId: string;
  parentSpanId?: string;
  name: string;
  kind: number;
  status?: { code?: number; message?: string };
  attributes: { key: string; value: Record<string, unknown> }[];
}

/** A collector of OTLP in JSON. */
function collector() {
  const spans: Span[] = [];
  const server = Deno.serve({ port: 0, hostname: "127.0.0.1", onListen() {} }, async (request) => {
    const body = await request.json();
    for (const { scopeSpans } of body.resourceSpans ?? []) {
      for (const scope of scopeSpans) spans.push(...scope.spans);
    }
    return Response.json({});
  });
  return {
    spans,
    env: {
      OTEL_DENO: "true",
      OTEL_EXPORTER_OTLP_PROTOCOL: "http/json",
      OTEL_EXPORTER_OTLP_ENDPOINT: `http://127.0.0.1:${server.addr.port}`,
      OTEL_BSP_SCHEDULE_DELAY: "100",
    },
    [Symbol.asyncDispose]: () => server.shutdown(),
  };
}

const attributesOf = ({ attributes }: Span) =>
  Object.fromEntries(attributes.map(({ key, value }) => [key, Object.values(value)[0]]));

test(
  "a trace goes from the request that submitted a job on to its run, and to its process",
  async (sql, url) => {
    await using otel = collector();
    await using site = await startSite(url, [], otel.env);
    const traceId = "0af7651916cd43dd8448eb211c80319c";
    const response = await site.ask("/api/jobs", {
      method: "POST",
      headers: {
        "content-type": "application/json",
        traceparent: `00-${traceId}-b7ad6b7169203331-01`,
      },
      body: JSON.stringify({ kind: "traceparent" }),
    });
    const { id } = await response.json();
    assert(response.ok, `${response.status}`);
    await using _ = startWorker(url, [], [], otel.env);
    const run = await waitFor(
      () => otel.spans.find(({ name }) => name === "run traceparent"),
      "the span of the run",
    );
    const request = await waitFor(
      () => otel.spans.find((span) => span.traceId === traceId && span.name.startsWith("POST")),
      "the span of the request",
    );
    assertEquals(request.parentSpanId, "b7ad6b7169203331");
    assertEquals([run.traceId, run.parentSpanId], [traceId, request.spanId]);
    const attributes = attributesOf(run);
    assertEquals(
      [
        attributes["siding.job"],
        attributes["siding.outcome"],
        Number(attributes["siding.attempt"]),
      ],
      [id, "done", 1],
    );
    assert(Number(attributes["siding.wait_ms"]) > 0);
    const [job] = await queue.get(sql, [id]);
    assertEquals(job.result, `00-${run.traceId}-${run.spanId}-01`);
  },
);

test(
  "a run that fails says so in its span; one that nobody traced is a trace of its own",
  async (sql, url) => {
    await using otel = collector();
    const parent = "00-11111111111111111111111111111111-2222222222222222-01";
    await queue.enqueue(sql, [
      {
        kind: "throws",
        payload: { message: "no such tune", permanent: true },
        trace_parent: parent,
      },
      { kind: "echo" },
      { kind: "number", payload: 7, trace_parent: "nonsense" },
    ]);
    await using _ = startWorker(url, [], [], otel.env);
    const runs = await waitFor(() => {
      const runs = otel.spans.filter(({ name }) => name.startsWith("run "));
      return runs.length === 3 && Object.fromEntries(runs.map((run) => [run.name.slice(4), run]));
    }, "three runs");
    const { throws, echo, number } = runs;
    assertEquals([throws.traceId, throws.parentSpanId], ["1".repeat(32), "2".repeat(16)]);
    assertEquals([throws.status?.code, throws.status?.message], [2, "no such tune"]);
    for (const run of [echo, number]) {
      assertMatch(run.traceId, /^(?!1{32})[0-9a-f]{32}$/);
      assert(!run.parentSpanId, run.parentSpanId);
      assert(run.status?.code !== 2);
    }
  },
);

test("without a collector a job's process gets the trace of what enqueued it", async (sql, url) => {
  const trace_parent = "00-11111111111111111111111111111111-2222222222222222-01";
  const entries = await queue.enqueue(sql, [{ kind: "traceparent", trace_parent }, {
    kind: "traceparent",
  }]);
  await using _ = startWorker(url);
  const jobs = await waitFor(async () => {
    const jobs = await queue.get(sql, entries.map(({ id }) => id));
    return jobs.every(({ status }) => status === "done") && jobs;
  }, "both to be done");
  assertEquals(jobs.map(({ result }) => result), [trace_parent, "none"]);
});
