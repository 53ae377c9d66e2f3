/**
 * Traces that go on from what enqueued a job to its run. The job's row carries the W3C trace context.
 *
 * Deno itself records and sends spans where OTEL_DENO=true is set; without it the calls here come to
 * nothing.
 */
import { ROOT_CONTEXT, SpanKind, SpanStatusCode, trace } from "@opentelemetry/api";
import { nameTrace } from "./log.ts";
import type { Job, Outcome } from "./queue.ts";

const tracer = trace.getTracer("siding");
/** Spans that nobody records cost more than many a small job. */
const traces = !!Deno.env.get("OTEL_DENO");

/** A W3C trace context. */
const PARENT = /^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})/;

/** The W3C trace context of what is under way; undefined where it is not traced. */
export function traceParent(): string | undefined {
  const context = trace.getActiveSpan()?.spanContext();
  if (!context) return undefined;
  const flags = context.traceFlags.toString(16).padStart(2, "0");
  return `00-${context.traceId}-${context.spanId}-${flags}`;
}

/** The trace of what is under way, or else the job's; undefined where there is none. */
export function traceId(job?: Job): string | undefined {
  return trace.getActiveSpan()?.spanContext().traceId ?? PARENT.exec(job?.trace_parent ?? "")?.[1];
}

nameTrace(traceId);

/** Runs an attempt as a span of the trace that enqueued its job, or as a trace of its own. */
export function traced(
  job: Job,
  run: () => Promise<Outcome | null>,
): Promise<Outcome | null> {
  if (!traces) return run();
  const { id, kind, queue, attempt, wait_ms } = job;
  const options = {
    kind: SpanKind.CONSUMER,
    attributes: {
      "siding.job": id,
      "siding.kind": kind,
      "siding.queue": queue,
      "siding.attempt": attempt,
      "siding.wait_ms": wait_ms,
    },
  };
  return tracer.startActiveSpan(`run ${kind}`, options, contextOf(job), async (span) => {
    try {
      const outcome = await run();
      span.setAttribute("siding.outcome", outcome?.outcome ?? "lost");
      if (outcome && "error" in outcome) {
        span.setStatus({ code: SpanStatusCode.ERROR, message: outcome.error });
      }
      return outcome;
    } finally {
      span.end();
    }
  });
}

/** What a job's row says of its trace. A text that is no trace context is none. */
function contextOf({ trace_parent }: Job) {
  const [, traceId, spanId, flags] = PARENT.exec(trace_parent ?? "") ?? [];
  if (!traceId) return ROOT_CONTEXT;
  return trace.setSpanContext(ROOT_CONTEXT, {
    ...{ traceId, spanId, traceFlags: parseInt(flags, 16), isRemote: true },
  });
}
