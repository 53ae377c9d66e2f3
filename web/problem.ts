/** Errors as the site answers them: problem+json (RFC 9457), which names the field, value and rule. */
import type { Context } from "hono";
import { HTTPException } from "hono/http-exception";
import type { z } from "zod";
import * as config from "../config.ts";
import { cut, describe, isTransient } from "../db.ts";
import { FileSwept, FileTooLarge } from "../files.ts";
import { EnqueueError, Refused } from "../queue.ts";

const log = config.logger("web");

/** What is wrong with one field of a request. */
export interface FieldProblem {
  /** Such as `payload.tempo_bpm`, or a header's name. */
  field: string;
  /** As it was given, cut; absent when it was missing. */
  value?: unknown;
  rule: string;
}

const titles: Record<number, string> = {
  400: "Bad request",
  401: "Not signed in",
  402: "Too few credits",
  403: "Forbidden",
  404: "Not found",
  405: "Method not allowed",
  408: "Too slow",
  409: "In no state for that",
  413: "Too large",
  415: "Unsupported media type",
  422: "Unprocessable",
  429: "Too many",
  500: "Internal error",
  503: "Not just now",
};

/** A request that cannot be answered as asked. */
export class Problem extends Error {
  override name = "Problem";
  constructor(
    readonly status: number,
    message: string,
    readonly extra: { errors?: FieldProblem[]; retryAfterS?: number } = {},
  ) {
    super(message);
  }
}

/** When to come back to a queue that was full: jobs end at any time. */
const FULL_RETRY_S = 30;
const statusOf: Record<string, number> = { SD402: 402, SD404: 404, SD409: 409, SD429: 429 };

/** What was thrown, as a {@linkcode Problem}; one that is nobody's fault but ours is logged and not shown. */
export function problemOf(error: unknown): Problem {
  if (error instanceof Problem) return error;
  if (error instanceof HTTPException) {
    return new Problem(error.status, error.message || titles[error.status] || "failed");
  }
  if (error instanceof EnqueueError) {
    // A queue or a file that is not there is a mistake in the request, which is there.
    const status = { SD402: 402, SD409: 409, SD429: 429 }[error.code] ?? 422;
    return new Problem(status, error.message, status === 429 ? { retryAfterS: FULL_RETRY_S } : {});
  }
  if (error instanceof Refused) return new Problem(statusOf[error.code] ?? 422, error.message);
  if (error instanceof FileTooLarge) return new Problem(413, error.message);
  if (error instanceof FileSwept) return new Problem(408, error.message);
  log.error("{error}", { error: describe(error) });
  return isTransient(error)
    ? new Problem(503, "the database cannot be reached just now", { retryAfterS: 5 })
    : new Problem(500, "something failed here; its log says what");
}

/** Answers with a problem. */
export function answer(c: Context, error: unknown): Response {
  const { status, message, extra } = problemOf(error);
  const headers: Record<string, string> = { "content-type": "application/problem+json" };
  if (extra.retryAfterS !== undefined) {
    headers["retry-after"] = String(Math.ceil(extra.retryAfterS));
  }
  if (status === 401) headers["www-authenticate"] = "Bearer";
  const body = {
    type: "about:blank",
    title: titles[status] ?? "Failed",
    status,
    detail: message,
    ...(extra.errors && { errors: extra.errors }),
  };
  return c.body(JSON.stringify(body), status as 400, headers);
}

/** Zod's issues as problems of fields, with the values that were given. */
export function fieldProblems(
  error: z.ZodError,
  given: unknown,
  prefix: string[] = [],
): FieldProblem[] {
  return error.issues.slice(0, 20).flatMap((issue) => {
    const place = [...prefix, ...issue.path].map(String);
    if (issue.code === "unrecognized_keys") {
      const names = issue.keys.slice(0, 20).map((key) => [...place, cut(key, 100)].join("."));
      return names.map((field) => ({ field, rule: "there is no such field" }));
    }
    let value: unknown = given;
    for (const key of issue.path) {
      value = (value as Record<PropertyKey, unknown> | undefined)?.[key];
    }
    const field = place.join(".") || "body";
    const text = typeof value === "string" && value.length > 100
      ? `${value.slice(0, 100)}…`
      : value;
    const shown = typeof text === "object" && text !== null ? undefined : text;
    return { field, ...(shown !== undefined && { value: shown }), rule: issue.message };
  });
}

/** Problem 422 of a value that does not fit its schema. */
export function unfit(error: z.ZodError, given: unknown, prefix: string[] = []): Problem {
  const errors = fieldProblems(error, given, prefix);
  return new Problem(422, errors.map((e) => `${e.field}: ${e.rule}`).join("; "), { errors });
}
