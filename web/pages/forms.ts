/** Forms that hold a few short fields. One with files is read as a stream instead: see submit.ts. */
import type { Context, MiddlewareHandler } from "hono";
import { bodyLimit } from "hono/body-limit";
import { assertCsrf } from "../auth.ts";
import { Problem } from "../problem.ts";
import type { Env } from "../site.ts";

const MAX_FORM_BYTES = 64 * 1024;

/** Refuses a form that is larger than one of ours can be. */
export const shortForm: MiddlewareHandler = bodyLimit({
  maxSize: MAX_FORM_BYTES,
  onError: () => {
    throw new Problem(413, `the form is larger than ${MAX_FORM_BYTES} bytes`);
  },
});

/** A form's fields, the last of each name. */
export async function formOf(c: Context<Env>): Promise<Record<string, string | undefined>> {
  const type = c.req.header("content-type") ?? "";
  if (!type.startsWith("application/x-www-form-urlencoded")) {
    throw new Problem(415, "a form is expected, as application/x-www-form-urlencoded");
  }
  return Object.fromEntries(new URLSearchParams(await c.req.text()));
}

/** The fields of a form of the signed-in. @throws Problem 403 when it is not of this session */
export async function trustedForm(c: Context<Env>): Promise<Record<string, string | undefined>> {
  const fields = await formOf(c);
  await assertCsrf(c, fields.csrf);
  return fields;
}

/** An optional whole number; an empty field is null. @throws Problem 422 */
export const wholeNumber = (text: string | undefined, field: string, min: number, max: number) =>
  number(text, field, min, max, { form: /^-?\d{1,12}$/, name: "a whole number" });

/** An optional number of at most three decimals; an empty field is null. @throws Problem 422 */
export const decimal = (text: string | undefined, field: string, min: number, max: number) =>
  number(text, field, min, max, { form: /^\d{1,12}(\.\d{1,3})?$/, name: "a number" });

function number(
  text: string | undefined,
  field: string,
  min: number,
  max: number,
  { form, name }: { form: RegExp; name: string },
): number | null {
  const given = (text ?? "").trim();
  if (given === "") return null;
  const value = form.test(given) ? Number(given) : NaN;
  if (!(value >= min && value <= max)) {
    const rule = `it must be ${name} from ${min} to ${max}`;
    throw new Problem(422, `${field} is "${given.slice(0, 50)}": ${rule}`, {
      errors: [{ field, value: given.slice(0, 50), rule }],
    });
  }
  return value;
}
